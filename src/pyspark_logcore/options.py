"""Options of the reader and the writer: checks them, and converts them to values.

Rules:
- Names are the names of Spark's Kafka format. Case does not matter, because Spark
  passes names in lower case.
- An unsupported option that would change the result is an error. An option that only
  tunes Kafka's clients is accepted and ignored. An unknown name is an error that
  suggests the nearest name.
- Security options are an error: they would not protect the files.

This module opens nothing and imports no pyspark; offsets are looked up by planning.py.
"""

from __future__ import annotations

import json
import os
import re
import urllib.parse
import uuid
import warnings
from collections.abc import Mapping
from typing import Any, Final, Literal

import attrs

from logcore.errors import InvalidConfigError, nearest_name

#: Offsets in JSON: Kafka's marks for the two ends.
EARLIEST: Final = -2
LATEST: Final = -1

_COMMON: Final = {
    "path": "the log directory, such as data with data/orders-0 in it; to read, also a URI such as s3://bucket/data",
    "ignoreSecurityOptions": "for tests of Kafka jobs: their security options are ignored (false)",
    "includeHeaders": "whether the result has the column headers (false)",
}
STREAM_OPTIONS: Final = {
    "maxOffsetsPerTrigger": "streams: maximum records of a micro-batch, divided among partitions as in Kafka's source",
    "minOffsetsPerTrigger": "streams: a micro-batch waits for this number of records",
    "maxTriggerDelay": "streams: but not longer than this (15m)",
    "checkpointLocation": "streams: the checkpoint of the query, in which the source stores its first offsets",
    "commitOffsets": "streams: offsets of finished batches are committed to the consumer group kafka.group.id (false)",
}
STORE_OPTIONS: Final = {
    "store.endpoint": "s3: address of the server, such as http://127.0.0.1:9000 (AWS)",
    "store.region": "s3: region of the bucket (requested from AWS)",
    "store.accessKey": "s3: with store.secretKey, the credentials (default: from the environment)",
    "store.secretKey": "s3: see store.accessKey",
    "store.sessionToken": "s3: of temporary credentials",
    "store.anonymous": "s3: a public bucket, which is read without credentials (false)",
}
READ_OPTIONS: Final = {
    **_COMMON,
    "subscribe": "topics, separated by commas",
    "subscribePattern": "a regular expression that must match the whole name of a topic",
    "assign": 'partitions as JSON, {"orders": [0, 1]}',
    "startingOffsets": 'earliest, or JSON {"orders": {"0": 23, "1": -2}} (earliest)',
    "endingOffsets": 'latest, or JSON {"orders": {"0": 50, "1": -1}} (latest)',
    "startingTimestamp": "epoch milliseconds: begin at the first record with this or a later timestamp",
    "endingTimestamp": "epoch milliseconds: end before the first record with this or a later timestamp",
    "startingOffsetsByTimestamp": 'JSON {"orders": {"0": 1700000000000}}',
    "endingOffsetsByTimestamp": "the same, for the end",
    "startingOffsetsByTimestampStrategy": "if no record has such a timestamp: error, or latest (error)",
    "failOnDataLoss": "whether lost records are an error, or a warning (true)",
    "minPartitions": "approximate minimum number of tasks",
    "maxRecordsPerPartition": "maximum number of records of one task",
    "maxPartitionBytes": "a task reads about this number of bytes at most (134217728)",
    "packBytes": "small ranges share a task up to this number of bytes; 0 gives each its own task (8388608)",
    "openCostBytes": "cost of a range in addition to its bytes, when ranges share a task (131072)",
    "maxBatchRows": "rows of an Arrow batch (32768)",
    "maxBatchBytes": "bytes of an Arrow batch (8388608)",
    "gcFreeze": "whether a Python worker excludes imported modules from garbage collections (true)",
    **STREAM_OPTIONS,
    **STORE_OPTIONS,
    "groupIdPrefix": "ignored: no consumer group is joined",
    "kafkaConsumer.pollTimeoutMs": "through a broker: how long to wait for an answer (120000)",
    "fetchOffset.numRetries": "ignored",
    "fetchOffset.retryIntervalMs": "ignored",
}
WRITE_OPTIONS: Final = {
    **_COMMON,
    "topic": "the topic of all rows; overrides the column topic",
    "numPartitions": "partitions of a topic that the write creates (1)",
    "useTimestampColumn": "records get the time in the column timestamp instead of the time of the write (false)",
    "txnAppId": "with txnVersion: the name of a write, which is not repeated once it is done",
    "txnVersion": "number that increases with each write of one txnAppId",
    "carryBytes": "a task that writes at most this number of bytes sends them to the driver, without files (262144)",
    "publishTimeout": "seconds to wait for the process that holds the directory (60)",
    "gcFreeze": READ_OPTIONS["gcFreeze"],
}
#: Options that Spark adds.
_SPARK_OPTIONS: Final = re.compile(
    r"owner|provider|checkpointlocation|option\..*|serialization\.format"
)
#: From the settings of Kafka's clients, Java's and librdkafka's, to the settings of the
#: client library.
_CLIENT: Final = {
    "kafka.security.protocol": "security_protocol",
    "kafka.sasl.mechanism": "sasl_mechanism",
    "kafka.sasl.mechanisms": "sasl_mechanism",
    "kafka.sasl.username": "sasl_plain_username",
    "kafka.sasl.password": "sasl_plain_password",
    "kafka.sasl.kerberos.service.name": "sasl_kerberos_service_name",
    "kafka.ssl.ca.location": "ssl_cafile",
    "kafka.ssl.truststore.location": "ssl_cafile",
    "kafka.ssl.certificate.location": "ssl_certfile",
    "kafka.ssl.keystore.location": "ssl_certfile",
    "kafka.ssl.key.location": "ssl_keyfile",
    "kafka.ssl.key.password": "ssl_password",
    "kafka.ssl.crl.location": "ssl_crlfile",
    "kafka.client.dns.lookup": "client_dns_lookup",
    "kafka.reconnect.backoff.ms": "reconnect_backoff_ms",
}
_CLIENT_NUMBERS: Final = ("kafka.reconnect.backoff.ms",)
_READ_BY_BROKERS: Final = (
    "kafka.sasl.jaas.config",
    "kafka.ssl.endpoint.identification.algorithm",
    "kafka.ssl.truststore.type",
    "kafka.ssl.keystore.type",
)
_LOGIN: Final = re.compile(
    r"\s*[\w.]*\.(?:PlainLoginModule|ScramLoginModule)\s+required\s+((?:\w+\s*=\s*\"[^\"]*\"\s*)*);\s*"
)
_ADDRESS: Final = re.compile(r"(\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9_.-]+):\d{1,5}")
_SECURITY: Final = re.compile(r"kafka\.(security\.|sasl\.|ssl\.|.*\.token|delegation)")
_REFUSED: Final = re.compile(
    r"kafka\.(auto\.offset\.reset|(key|value)\.(de)?serializer|enable\.auto\.commit|interceptor\.classes)"
)
#: From options to settings of pyarrow's S3FileSystem.
_STORE_SETTINGS: Final = {
    "store.endpoint": "endpoint_override",
    "store.region": "region",
    "store.accessKey": "access_key",
    "store.secretKey": "secret_key",
    "store.sessionToken": "session_token",
}
_CODECS: Final = ("none", "gzip", "snappy", "lz4", "zstd")
_DURATION: Final = re.compile(r"\s*(\d{1,12})\s*(ms|s|m|min|h|d)?\s*")
_UNIT_SECONDS: Final = {
    "ms": 0.001,
    "s": 1.0,
    "m": 60.0,
    "min": 60.0,
    "h": 3_600.0,
    "d": 86_400.0,
}
Bound = Literal["earliest", "latest"]
OffsetMap = Mapping[tuple[str, int], int]


@attrs.frozen
class RangeEnd:
    """Start or end of a read: a bound, an offset for each partition, or a time for each
    partition or for all.
    """

    bound: Bound | None = None
    offsets: OffsetMap | None = None
    timestamps_ms: OffsetMap | int | None = None
    #: The result of a start by time if all records are older.
    strategy: Literal["error", "latest"] = "error"


@attrs.frozen(kw_only=True)
class Brokers:
    """A cluster to read from."""

    #: host:port, separated by commas.
    servers: str
    #: Settings of the client library, by its own names. They contain passwords.
    settings: Mapping[str, Any] = attrs.field(repr=False)
    #: How long to wait for an answer.
    timeout_seconds: float


@attrs.frozen(kw_only=True)
class ObjectStore:
    """An object store to read from."""

    #: The URI without secrets, for texts.
    location: str
    #: The URI as the user passed it.
    uri: str = attrs.field(repr=False)
    #: Whether `settings` are settings of pyarrow's S3FileSystem. Others have none.
    is_s3: bool
    #: Settings of the file system. They contain passwords.
    settings: Mapping[str, Any] = attrs.field(repr=False)

    def hide(self, text: str) -> str:
        """Return a text without credentials and without the URI that may hold some."""
        secrets = [
            str(self.settings.get(name, ""))
            for name in ("secret_key", "session_token", "access_key")
        ]
        for secret in (self.uri if self.uri != self.location else "", *secrets):
            if secret:
                text = text.replace(secret, "...")
        return text


@attrs.frozen(kw_only=True)
class ReadOptions:
    """Options of a read: the source, the partitions, the range and the limits."""

    #: Path of the directory; "" if `brokers` or `store` is not None.
    path: str
    brokers: Brokers | None
    store: ObjectStore | None
    subscribe: tuple[str, ...] | None
    pattern: str | None
    assign: tuple[tuple[str, int], ...] | None
    start: RangeEnd
    end: RangeEnd
    fail_on_data_loss: bool
    include_headers: bool
    isolation: Literal["read_uncommitted", "read_committed"]
    min_partitions: int | None
    max_records: int | None
    max_partition_bytes: int
    pack_bytes: int
    open_cost_bytes: int
    batch_rows: int
    batch_bytes: int
    gc_freeze: bool


@attrs.frozen(kw_only=True)
class StreamOptions:
    """Options of a streaming read."""

    read: ReadOptions
    max_offsets: int | None
    min_offsets: int | None
    max_delay_seconds: float
    #: The directory that keeps the first offsets, if any.
    checkpoint_location: str | None
    #: The consumer group that gets commits of offsets, if any.
    group_id: str | None


@attrs.frozen(kw_only=True)
class WriteOptions:
    """Options of a batch write."""

    path: str
    topic: str | None
    partitions: int
    use_timestamp: bool
    #: The name of the write.
    app_id: str
    version: int
    #: Whether the user chose the name.
    given: bool
    carry_bytes: int
    publish_timeout: float
    codec: str | None
    batch_bytes: int
    gc_freeze: bool


def parse_headers(given: Mapping[str, str]) -> bool:
    """Return whether a batch read or a stream has the column headers.

    Only the names of all options are checked, and no other values. When Spark requests
    the columns, it has not yet chosen between a batch and a stream.

    Raises:
        InvalidConfigError: an option is unknown, or includeHeaders is invalid.
    """
    return _Options(given, READ_OPTIONS, reads_brokers=True).boolean(
        "includeHeaders", False
    )


def parse_read(given: Mapping[str, str]) -> ReadOptions:
    """Check the options of a batch read.

    Raises:
        InvalidConfigError: an option is wrong.
    """
    options = _Options(given, READ_OPTIONS, reads_brokers=True)
    for name in STREAM_OPTIONS:
        if options.text(name) is not None:
            warnings.warn(f"option {name} has no effect on a batch read", stacklevel=2)
    start = _start(options, moving=False)
    end = _end(options)
    if (
        start.offsets is not None
        and end.offsets is not None
        and start.offsets.keys() != end.offsets.keys()
    ):
        differing = sorted(start.offsets.keys() ^ end.offsets.keys())
        raise InvalidConfigError(
            "startingOffsets and endingOffsets must name the same partitions",
            found=differing,
        )
    return _read_options(options, start, end)


def parse_stream(given: Mapping[str, str]) -> StreamOptions:
    """Check the options of a streaming read.

    Raises:
        InvalidConfigError: an option is wrong.
    """
    options = _Options(given, READ_OPTIONS, reads_brokers=True)
    for name in ("endingOffsets", "endingTimestamp", "endingOffsetsByTimestamp"):
        if options.text(name) is not None:
            raise InvalidConfigError(
                f"option {name} is for batch reads: a stream has no end"
            )
    most = options.number("maxOffsetsPerTrigger", None, 1)
    least = options.number("minOffsetsPerTrigger", None, 1)
    if most is not None and least is not None and least > most:
        raise InvalidConfigError(
            "minOffsetsPerTrigger is higher than maxOffsetsPerTrigger",
            expected=f"at most {most}",
            found=least,
        )
    group = options.text("kafka.group.id")
    commits = options.boolean("commitOffsets", False)
    if commits and not group:
        raise InvalidConfigError(
            "commitOffsets=true needs the option kafka.group.id, the group to commit to"
        )
    location = options.text("checkpointLocation")
    read = _read_options(options, _start(options, moving=True), RangeEnd("latest"))
    if read.store is not None:
        raise InvalidConfigError(
            "a stream reads a log directory or a broker; an object store holds archives, for batch reads only",
            found=read.store.location,
        )
    return StreamOptions(
        read=read,
        max_offsets=most,
        min_offsets=least,
        max_delay_seconds=options.duration("maxTriggerDelay", 900.0),
        checkpoint_location=None
        if location is None
        else local_path(location, "option checkpointLocation"),
        group_id=group if commits else None,
    )


def _read_options(options: _Options, start: RangeEnd, end: RangeEnd) -> ReadOptions:
    given_names = [
        name
        for name in ("subscribe", "subscribePattern", "assign")
        if options.text(name) is not None
    ]
    if len(given_names) != 1:
        raise InvalidConfigError(
            "one of subscribe, subscribePattern and assign must be given",
            found=given_names or "none",
        )
    names = options.text("subscribe")
    topics = None
    if names is not None:
        topics = tuple(
            dict.fromkeys(name.strip() for name in names.split(",") if name.strip())
        )
        if not topics:
            raise InvalidConfigError(
                "option subscribe names no topic", found=repr(names)
            )
    pattern = options.text("subscribePattern")
    if pattern is not None:
        try:
            re.compile(pattern)
        except re.error as error:
            raise InvalidConfigError(
                f"option subscribePattern: {error}", found=repr(pattern)
            ) from error
    isolation = options.choice(
        "kafka.isolation.level",
        "read_uncommitted",
        ("read_uncommitted", "read_committed"),
    )
    brokers = options.brokers()
    store = None
    if brokers is None:
        store = options.store()
    return ReadOptions(
        path=options.path() if brokers is None and store is None else "",
        brokers=brokers,
        store=store,
        subscribe=topics,
        pattern=pattern,
        assign=_assignment(options),
        start=start,
        end=end,
        fail_on_data_loss=options.boolean("failOnDataLoss", True),
        include_headers=options.boolean("includeHeaders", False),
        isolation="read_committed"
        if isolation == "read_committed"
        else "read_uncommitted",
        min_partitions=options.number("minPartitions", None, 1),
        max_records=options.number("maxRecordsPerPartition", None, 1),
        max_partition_bytes=options.number("maxPartitionBytes", 128 << 20, 1),
        pack_bytes=options.number("packBytes", 8 << 20, 0),
        open_cost_bytes=options.number("openCostBytes", 128 << 10, 0),
        batch_rows=options.number("maxBatchRows", 32_768, 1),
        batch_bytes=options.number("maxBatchBytes", 8 << 20, 1),
        gc_freeze=options.boolean("gcFreeze", True),
    )


def parse_stream_write(given: Mapping[str, str]) -> WriteOptions:
    """Check the options of a streaming write.

    Raises:
        InvalidConfigError: an option is wrong.
    """
    for name in ("txnAppId", "txnVersion"):
        if any(given_name.lower() == name.lower() for given_name in given):
            raise InvalidConfigError(
                f"option {name} is for batch writes: a stream names its writes by query and batch"
            )
    return parse_write(given)


def parse_write(given: Mapping[str, str]) -> WriteOptions:
    """Check the options of a batch write.

    Raises:
        InvalidConfigError: an option is wrong.
    """
    options = _Options(given, WRITE_OPTIONS)
    scheme = re.match(_SCHEME, options.text("path") or "")
    if scheme and scheme[1].lower() != "file":
        raise InvalidConfigError(
            "an object store is only read. Write to a log directory of a file system, and copy its files to the store "
            "when they no longer change",
            found=f"a path that begins with {scheme[1]}:/",
        )
    app_id = options.text("txnAppId")
    version = options.number("txnVersion", None, 0)
    if (app_id is None) != (version is None):
        raise InvalidConfigError(
            "txnAppId and txnVersion go together; only one of them was given"
        )
    codec = options.text("kafka.compression.type")
    if codec is not None:
        codec = options.choice("kafka.compression.type", "none", _CODECS)
    partitioner = options.text("kafka.partitioner.class")
    if partitioner is not None and not partitioner.endswith(
        ("DefaultPartitioner", "BuiltInPartitioner")
    ):
        raise InvalidConfigError(
            "kafka.partitioner.class names Java code, which is not supported",
            found=repr(partitioner),
        )
    return WriteOptions(
        path=options.path(),
        topic=options.text("topic"),
        partitions=options.number("numPartitions", 1, 1),
        use_timestamp=options.boolean("useTimestampColumn", False),
        app_id=app_id if app_id is not None else uuid.uuid4().hex,
        version=version or 0,
        given=app_id is not None,
        carry_bytes=options.number("carryBytes", 256 << 10, 0),
        publish_timeout=options.seconds("publishTimeout", 60.0),
        codec=codec,
        batch_bytes=options.number("kafka.batch.size", 64 << 10, 1),
        gc_freeze=options.boolean("gcFreeze", True),
    )


_SCHEME: Final = r"([A-Za-z][A-Za-z0-9+.-]+):/"


def local_path(given: str, what: str) -> str:
    """Return a path, or a file: URI, as an absolute path.

    Raises:
        InvalidConfigError: the text is another URI.
    """
    scheme = re.match(_SCHEME, given)
    if scheme and scheme[1].lower() != "file":
        raise InvalidConfigError(
            f"{what} is in a file system, not at a URL", found=repr(given)
        )
    if scheme:
        path = urllib.parse.unquote(
            re.sub(r"^[A-Za-z]+:(//(localhost)?(?=/))?", "", given)
        )
    else:
        path = given
    if path.startswith("//"):
        raise InvalidConfigError(
            f"{what} must be a path on this machine", found=repr(given)
        )
    return os.path.abspath(path)


class _Options:
    """The given options, each looked up by the name that users write."""

    def __init__(
        self,
        given: Mapping[str, str],
        known: Mapping[str, str],
        *,
        reads_brokers: bool = False,
    ) -> None:
        self._given = {name.lower(): str(value) for name, value in given.items()}
        to_brokers = reads_brokers and self._servers() is not None
        names = {name.lower(): name for name in known}
        for name in self._given:
            if name in names or _SPARK_OPTIONS.fullmatch(name):
                continue
            if to_brokers and (name in _CLIENT or name in _READ_BY_BROKERS):
                continue
            if to_brokers and _SECURITY.match(name):
                raise InvalidConfigError(
                    f"option {name} is not supported by this reader; use Spark's own Kafka connector for it",
                    expected=", ".join(sorted({*_CLIENT, *_READ_BY_BROKERS})),
                )
            if _SECURITY.match(name) and self.boolean("ignoreSecurityOptions", False):
                continue
            if _SECURITY.match(name):
                raise InvalidConfigError(
                    f"option {name} has no effect: the log is files, protected only by their permissions"
                )
            if _REFUSED.fullmatch(name):
                raise InvalidConfigError(
                    f"option {name} is not supported, as in Spark's Kafka source"
                )
            if name.startswith("kafka."):
                continue
            nearest = nearest_name(name, names)
            if nearest is not None:
                hint = f"did you mean {names[nearest]}?"
            else:
                hint = f"known are {', '.join(sorted(known))}"
            raise InvalidConfigError(f"unknown option {name}; {hint}")

    def text(self, name: str) -> str | None:
        return self._given.get(name.lower())

    def _servers(self) -> str | None:
        """Return host:port of the brokers, or None if a directory is given."""
        text = self.text("kafka.bootstrap.servers")
        if (
            text is None
            or self.text("path") is not None
            or os.environ.get("LOGCORE_PATH")
        ):
            return None
        addresses = [part.strip() for part in text.split(",")]
        if all(_ADDRESS.fullmatch(address) for address in addresses):
            return ",".join(addresses)
        return None

    def brokers(self) -> Brokers | None:
        """Return the cluster to read from, or None if a directory is given.

        Raises:
            InvalidConfigError: an option of the cluster is wrong.
        """
        servers = self._servers()
        if servers is None:
            return None
        settings: dict[str, Any] = {}
        for name, ours in _CLIENT.items():
            text = self.text(name)
            if text is not None:
                settings[ours] = (
                    self.number(name, None, 0) if name in _CLIENT_NUMBERS else text
                )
        login = self.text("kafka.sasl.jaas.config")
        if login is not None:
            found = _LOGIN.fullmatch(login)
            if found:
                facts = dict(re.findall(r'(\w+)\s*=\s*"([^"]*)"', found[1]))
            else:
                facts = {}
            if not facts.keys() >= {"username", "password"}:
                raise InvalidConfigError(
                    "option kafka.sasl.jaas.config",
                    expected='...PlainLoginModule or ...ScramLoginModule required username="..." password="...";',
                    found="another text, which is not shown",
                )
            settings["sasl_plain_username"] = facts["username"]
            settings["sasl_plain_password"] = facts["password"]
        for name in ("kafka.ssl.truststore.type", "kafka.ssl.keystore.type"):
            if (
                name.replace(".type", ".location") in self._given
                and (self.text(name) or "JKS").upper() != "PEM"
            ):
                raise InvalidConfigError(
                    f"option {name}",
                    expected="PEM, with a file in that format",
                    found="JKS",
                )
        if self.text("kafka.ssl.endpoint.identification.algorithm") == "":
            settings["ssl_check_hostname"] = False
        timeout_ms = self.number("kafkaConsumer.pollTimeoutMs", 120_000, 1)
        return Brokers(
            servers=servers, settings=settings, timeout_seconds=timeout_ms / 1000
        )

    def store(self) -> ObjectStore | None:
        """Return the object store that the option path names, or None for a directory.

        Raises:
            InvalidConfigError: an option of the store is wrong.
        """
        given = self.text("path") or ""
        scheme = re.match(_SCHEME, given)
        if scheme is None or scheme[1].lower() == "file":
            for name in STORE_OPTIONS:
                if self.text(name) is not None:
                    raise InvalidConfigError(
                        f"option {name} is for object stores; the path is not the URI of one"
                    )
            return None
        parts = urllib.parse.urlsplit(given)
        is_s3 = scheme[1].lower() in ("s3", "s3a", "s3n")
        host = parts.hostname or ""
        location = f"{'s3' if is_s3 else parts.scheme}://{parts.netloc.rpartition('@')[2]}{parts.path.rstrip('/')}"
        if is_s3 and (
            parts.username is not None or parts.query or parts.fragment or not host
        ):
            raise InvalidConfigError(
                "credentials and settings of an object store are options: store.accessKey, store.secretKey, "
                "store.region, store.endpoint",
                expected="s3://bucket/path",
                found="a URI with additional parts, which is not shown",
            )
        settings: dict[str, Any] = {}
        for name, ours in _STORE_SETTINGS.items():
            text = self.text(name)
            if text is not None and not is_s3:
                raise InvalidConfigError(
                    f"option {name} is for s3; for this store, use the environment or the URI"
                )
            if text is not None:
                settings[ours] = text
        if ("access_key" in settings) != ("secret_key" in settings):
            raise InvalidConfigError(
                "store.accessKey and store.secretKey go together; only one of them was given"
            )
        endpoint = settings.get("endpoint_override")
        if endpoint is not None:
            found = re.fullmatch(r"(?:(https?)://)?([^/?#@\s]+)/?", endpoint)
            if found is None:
                raise InvalidConfigError(
                    "option store.endpoint",
                    expected="an address such as http://127.0.0.1:9000",
                    found="something else",
                )
            settings["endpoint_override"] = found[2]
            settings["scheme"] = found[1] or "https"
        if self.boolean("store.anonymous", False):
            settings["anonymous"] = True
        return ObjectStore(location=location, uri=given, is_s3=is_s3, settings=settings)

    def path(self) -> str:
        """Return the log directory: the option path, or a path in the place of Kafka's
        servers.
        """
        path = self.text("path") or self.text("kafka.bootstrap.servers")
        if path is None:
            raise InvalidConfigError(
                'the log directory is missing: give .load("data"), or option path'
            )
        if re.match(_SCHEME, path):
            return local_path(path, "a log directory")
        if self.text("path") is None and not path.startswith("/"):
            path = os.environ.get("LOGCORE_PATH", "")
            if not path:
                raise InvalidConfigError(
                    'the log directory is missing: give .load("data"), option path, or the variable LOGCORE_PATH',
                    expected="a path; to read through brokers, addresses such as host:9092",
                    found=repr(self.text("kafka.bootstrap.servers")),
                )
        return os.path.abspath(path)

    def boolean(self, name: str, default: bool) -> bool:
        text = (self.text(name) or str(default)).strip().lower()
        if text not in ("true", "false"):
            raise InvalidConfigError(
                f"option {name}", expected="true or false", found=repr(self.text(name))
            )
        return text == "true"

    def number(self, name: str, default: Any, low: int) -> Any:
        text = self.text(name)
        if text is None:
            return default
        if not re.fullmatch(r"\s*\d{1,18}\s*", text) or int(text) < low:
            raise InvalidConfigError(
                f"option {name}",
                expected=f"a whole number, at least {low}",
                found=repr(text),
            )
        return int(text)

    def seconds(self, name: str, default: float) -> float:
        text = self.text(name)
        if text is None:
            return default
        if not re.fullmatch(r"\s*\d{1,9}(\.\d*)?\s*s?\s*", text):
            raise InvalidConfigError(
                f"option {name}", expected="a number of seconds", found=repr(text)
            )
        return float(text.strip().removesuffix("s"))

    def duration(self, name: str, default: float) -> float:
        """Parse a duration as in Spark's settings, such as 15m, 30s or 100ms, to seconds."""
        text = self.text(name)
        if text is None:
            return default
        found = _DURATION.fullmatch(text.lower())
        if found is None:
            raise InvalidConfigError(
                f"option {name}",
                expected="a number with ms, s, m, h or d, such as 15m",
                found=repr(text),
            )
        return int(found[1]) * _UNIT_SECONDS[found[2] or "ms"]

    def choice(self, name: str, default: str, choices: tuple[str, ...]) -> str:
        text = (self.text(name) or default).strip().lower()
        if text not in choices:
            raise InvalidConfigError(
                f"option {name}",
                expected=f"one of {', '.join(choices)}",
                found=repr(text),
            )
        return text

    def json(self, name: str) -> Any:
        text = self.text(name)
        if text is None:
            return None
        try:
            return json.loads(text)
        except (ValueError, RecursionError) as error:
            raise InvalidConfigError(
                f"option {name} is not JSON: {error}", found=repr(text)
            ) from error

    def partition_map(self, name: str, low: int) -> dict[tuple[str, int], int]:
        """Parse {"topic": {"0": number}} to a map of (topic, partition) to number."""
        found = self.json(name)
        shape = f'JSON like {{"orders": {{"0": 23}}}}, numbers of at least {low}'
        invalid = InvalidConfigError(
            f"option {name}", expected=shape, found=repr(self.text(name))
        )
        if not isinstance(found, dict):
            raise invalid
        numbers: dict[tuple[str, int], int] = {}
        for topic, partitions in found.items():
            if not isinstance(partitions, dict):
                raise invalid
            for partition, number in partitions.items():
                if (
                    not partition.isdecimal()
                    or isinstance(number, bool)
                    or not isinstance(number, int)
                ):
                    raise invalid
                if not low <= number < 1 << 63:
                    raise invalid
                numbers[topic, int(partition)] = number
        return numbers


def _assignment(options: _Options) -> tuple[tuple[str, int], ...] | None:
    found = options.json("assign")
    if found is None:
        return None
    invalid = InvalidConfigError(
        "option assign",
        expected='JSON like {"orders": [0, 1]}',
        found=repr(options.text("assign")),
    )
    if not isinstance(found, dict) or not found:
        raise invalid
    pairs = []
    for topic, numbers in found.items():
        if not isinstance(numbers, list) or any(
            type(number) is not int or number < 0 for number in numbers
        ):
            raise invalid
        pairs += [(topic, number) for number in numbers]
    return tuple(sorted(set(pairs)))


def _start(options: _Options, *, moving: bool) -> RangeEnd:
    """Return the start of a read.

    `moving` is true for a stream, whose start may be latest and by default is latest.
    """
    chosen = options.choice(
        "startingOffsetsByTimestampStrategy", "error", ("error", "latest")
    )
    strategy: Literal["error", "latest"] = "error"
    if chosen == "latest":
        strategy = "latest"
    timestamp_ms = options.number("startingTimestamp", None, 0)
    if timestamp_ms is not None:
        return RangeEnd(timestamps_ms=timestamp_ms, strategy=strategy)
    if options.text("startingOffsetsByTimestamp") is not None:
        return RangeEnd(
            timestamps_ms=options.partition_map("startingOffsetsByTimestamp", 0),
            strategy=strategy,
        )
    text = (
        options.text("startingOffsets") or ("latest" if moving else "earliest")
    ).strip()
    if text.lower() == "earliest":
        return RangeEnd("earliest")
    if text.lower() == "latest":
        if moving:
            return RangeEnd("latest")
        raise InvalidConfigError(
            "a batch read cannot start at latest: there are no records after it"
        )
    offsets = options.partition_map("startingOffsets", EARLIEST)
    if not moving and LATEST in offsets.values():
        raise InvalidConfigError(
            "a batch read cannot start at latest (-1): there are no records after it"
        )
    return RangeEnd(offsets=offsets)


def _end(options: _Options) -> RangeEnd:
    timestamp_ms = options.number("endingTimestamp", None, 0)
    if timestamp_ms is not None:
        return RangeEnd(timestamps_ms=timestamp_ms)
    if options.text("endingOffsetsByTimestamp") is not None:
        return RangeEnd(
            timestamps_ms=options.partition_map("endingOffsetsByTimestamp", 0)
        )
    text = (options.text("endingOffsets") or "latest").strip()
    if text.lower() == "latest":
        return RangeEnd("latest")
    if text.lower() == "earliest":
        raise InvalidConfigError(
            "a batch read cannot end at earliest: there are no records before it"
        )
    offsets = options.partition_map("endingOffsets", EARLIEST)
    if EARLIEST in offsets.values():
        raise InvalidConfigError(
            "a batch read cannot end at earliest (-2): there are no records before it"
        )
    return RangeEnd(offsets=offsets)
