import java.lang.reflect.Field;
import java.lang.reflect.Method;
import java.lang.reflect.Modifier;
import org.apache.kafka.common.protocol.ApiKeys;

/** Prints the APIs that brokers of this version of Kafka serve: key, oldest, latest. */
public class ApiRanges {
    public static void main(String[] arguments) throws Exception {
        for (ApiKeys api : ApiKeys.values()) {
            System.out.println(
                    number(api, "id") + " " + version(api, "oldestVersion") + " " + version(api, "latestVersion"));
        }
    }

    private static Object number(Object of, String name) throws Exception {
        Field field = of.getClass().getField(name);
        return field.get(of);
    }

    /** Versions that are not stable yet are served by a test setting only. */
    private static Object version(ApiKeys api, String name) throws Exception {
        Method found;
        try {
            return ApiKeys.class.getMethod(name, boolean.class).invoke(api, false);
        } catch (NoSuchMethodException notYet) {
            return ApiKeys.class.getMethod(name).invoke(api);
        }
    }
}
