// Answers authorization questions with Kafka's StandardAuthorizer, and writes subjects of certificates as Java does.
//
// Input, one line each, with fields separated by tabs:
//   acl TYPE PATTERN NAME PRINCIPAL HOST OPERATION PERMISSION   adds a rule; numbers as in the protocol
//   ask PRINCIPAL HOST OPERATION TYPE NAME                      prints true or false
//   some PRINCIPAL HOST                                         prints whether some topic is writable
//   clear                                                       removes all rules
//   subject BASE64                                              prints the subject of a DER certificate

import java.io.BufferedReader;
import java.io.ByteArrayInputStream;
import java.io.InputStreamReader;
import java.net.InetAddress;
import java.nio.charset.StandardCharsets;
import java.security.cert.CertificateFactory;
import java.security.cert.X509Certificate;
import java.util.Base64;
import java.util.HashMap;
import java.util.List;
import java.util.Map;
import org.apache.kafka.common.Uuid;
import org.apache.kafka.common.acl.AclOperation;
import org.apache.kafka.common.acl.AclPermissionType;
import org.apache.kafka.common.metrics.Metrics;
import org.apache.kafka.common.metrics.internals.PluginMetricsImpl;
import org.apache.kafka.common.resource.PatternType;
import org.apache.kafka.common.resource.ResourcePattern;
import org.apache.kafka.common.resource.ResourceType;
import org.apache.kafka.common.security.auth.KafkaPrincipal;
import org.apache.kafka.common.security.auth.SecurityProtocol;
import org.apache.kafka.common.utils.SecurityUtils;
import org.apache.kafka.metadata.authorizer.StandardAcl;
import org.apache.kafka.metadata.authorizer.StandardAuthorizer;
import org.apache.kafka.server.authorizer.Action;
import org.apache.kafka.server.authorizer.AuthorizableRequestContext;
import org.apache.kafka.server.authorizer.AuthorizationResult;

public class Authorization {
    record Asked(KafkaPrincipal principal, InetAddress clientAddress) implements AuthorizableRequestContext {
        public String listenerName() { return "PLAINTEXT"; }
        public SecurityProtocol securityProtocol() { return SecurityProtocol.PLAINTEXT; }
        public int requestType() { return 0; }
        public int requestVersion() { return 0; }
        public String clientId() { return "test"; }
        public int correlationId() { return 0; }
    }

    static Asked asked(String principal, String host) throws Exception {
        return new Asked(SecurityUtils.parseKafkaPrincipal(principal), InetAddress.getByName(host));
    }

    static StandardAuthorizer with(Map<Uuid, StandardAcl> acls) {
        StandardAuthorizer authorizer = new StandardAuthorizer();
        authorizer.configure(Map.of("super.users", "User:admin"));
        authorizer.withPluginMetrics(new PluginMetricsImpl(new Metrics(), Map.of()));
        authorizer.loadSnapshot(acls);
        authorizer.completeInitialLoad();
        return authorizer;
    }

    public static void main(String[] arguments) throws Exception {
        BufferedReader in = new BufferedReader(new InputStreamReader(System.in, StandardCharsets.UTF_8));
        Map<Uuid, StandardAcl> acls = new HashMap<>();
        StandardAuthorizer authorizer = null;
        StringBuilder out = new StringBuilder();
        for (String line = in.readLine(); line != null; line = in.readLine()) {
            String[] part = line.split("\t", -1);
            switch (part[0]) {
                case "clear" -> { acls.clear(); authorizer = null; }
                case "acl" -> {
                    acls.put(Uuid.randomUuid(), new StandardAcl(
                        ResourceType.fromCode(Byte.parseByte(part[1])), part[3],
                        PatternType.fromCode(Byte.parseByte(part[2])), part[4], part[5],
                        AclOperation.fromCode(Byte.parseByte(part[6])),
                        AclPermissionType.fromCode(Byte.parseByte(part[7]))));
                    authorizer = null;
                }
                case "ask" -> {
                    if (authorizer == null) authorizer = with(acls);
                    ResourcePattern on = new ResourcePattern(
                        ResourceType.fromCode(Byte.parseByte(part[4])), part[5], PatternType.LITERAL);
                    Action action = new Action(AclOperation.fromCode(Byte.parseByte(part[3])), on, 1, true, true);
                    out.append(authorizer.authorize(asked(part[1], part[2]), List.of(action)).get(0)
                        == AuthorizationResult.ALLOWED).append('\n');
                }
                case "some" -> {
                    if (authorizer == null) authorizer = with(acls);
                    out.append(authorizer.authorizeByResourceType(
                        asked(part[1], part[2]), AclOperation.WRITE, ResourceType.TOPIC)
                        == AuthorizationResult.ALLOWED).append('\n');
                }
                case "subject" -> {
                    X509Certificate certificate = (X509Certificate) CertificateFactory.getInstance("X.509")
                        .generateCertificate(new ByteArrayInputStream(Base64.getDecoder().decode(part[1])));
                    out.append(certificate.getSubjectX500Principal().getName().replace("\n", "\\n")).append('\n');
                }
                default -> throw new IllegalArgumentException(line);
            }
        }
        System.out.print(out);
    }
}
