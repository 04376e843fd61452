"""The compiler of the wire codec: converts the parsed table of a message to specialized
encode and decode functions.

The generated code has one function for each message, version and direction, with nested
structs inline as loops. Adjacent fields of fixed size are one struct.Struct. An empty
tagged section is a pad byte of the surrounding pack.

Rules:
- An array is created only if the remaining bytes could fill it, and if the total number
  of elements is allowed.
- Error messages cost nothing without an error. wire/codec.py finds the position of an
  error from the line of generated code that raised it, and from its variable `pos`.

This module depends on no message, and raises none of the errors that callers receive.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from typing import Any, Final

from netshim.wire.fields import NO_UUID, Field, Struct

#: One or several stored buffers of a response, which are sent unchanged.
Buffer = bytes | bytearray | memoryview

#: Types of fixed size, with their codes of the struct module.
_FIXED: Final = {
    "bool": "?",
    "int8": "b",
    "int16": "h",
    "uint16": "H",
    "int32": "i",
    "uint32": "I",
    "int64": "q",
    "float64": "d",
    "uuid": "16s",
}


class Malformed(Exception):
    """Raised by generated code and its helpers. codec.Message.decode() converts it to a
    ProtocolError, which also contains the field and the position.
    """

    def __init__(
        self, reason: str, expected: object = None, found: object = None
    ) -> None:
        super().__init__(reason)
        self.expected = expected
        self.found = found


# --- helpers of generated code --------------------------------------------------------


def encode_varint(value: int) -> bytes:
    """Encode an unsigned varint of at most five bytes."""
    if not 0 <= value <= 0xFFFFFFFF:
        raise ValueError(f"{value} does not fit an unsigned varint of 32 bits")
    encoded = bytearray()
    while value > 127:
        encoded.append(value & 127 | 128)
        value >>= 7
    encoded.append(value)
    return bytes(encoded)


def decode_varint(data: bytes | memoryview, pos: int) -> tuple[int, int]:
    """Return an unsigned varint and the position after it."""
    value = 0
    # An IndexError at the end of the data is an error of the peer too; see codec.py.
    for shift in (0, 7, 14, 21, 28):
        byte = data[pos]
        pos += 1
        value |= (byte & 127) << shift
        if byte < 128:
            # The fifth byte has room for 35 bits.
            if value > 0xFFFFFFFF:
                break
            return value, pos
    raise Malformed("an over-long varint", expected="32 bits in at most five bytes")


def skip_tags(data: bytes | memoryview, pos: int, size: int) -> int:
    """Return the position after a tagged section without known fields."""
    count, pos = decode_varint(data, pos)
    # A count of 2^32 does not loop for long: each tag takes two bytes or raises IndexError.
    for _ in range(count):
        tag, pos = decode_varint(data, pos)
        size_bytes, pos = decode_varint(data, pos)
        pos += size_bytes
        if pos > size:
            raise Malformed(
                f"tagged field {tag} is cut off",
                expected=f"{size_bytes} bytes",
                found=size - pos + size_bytes,
            )
    return pos


def split_records(records: Any) -> tuple[Sequence[Buffer], int]:
    """Return the buffers of a records value, and their size in bytes. No buffer is
    copied.
    """
    if records.__class__ is memoryview and records.itemsize == 1 and records.ndim == 1:
        return (records,), len(records)
    buffers: list[Buffer] = (
        list(records) if isinstance(records, list | tuple) else [records]
    )
    for slot, buffer in enumerate(buffers):
        if isinstance(buffer, memoryview):
            if buffer.itemsize != 1 or buffer.ndim != 1:
                buffers[slot] = buffer.cast("B")
        elif not isinstance(buffer, bytes | bytearray):
            raise TypeError(
                f"records are bytes, a memoryview or a list of them, not {type(buffer).__name__}"
            )
    return buffers, sum(map(len, buffers))


def check_uuid(value: bytes) -> bytes:
    # struct would pad or truncate it without an error.
    if len(value) != 16:
        raise ValueError(f"a uuid is 16 bytes, not {len(value)}")
    return value


class _Varints(dict[int, bytes]):
    """Varints by value. The smallest 256 are stored. __missing__ does not store the others,
    so that peers cannot make the dict grow.
    """

    def __missing__(self, value: int) -> bytes:
        return encode_varint(value)


class _Packers(dict[int, Callable[..., bytes]]):
    """Functions that pack n integers of one size, by n."""

    def __init__(self, code: str) -> None:
        super().__init__()
        self._code = code

    def __missing__(self, count: int) -> Callable[..., bytes]:
        packer = struct.Struct(f">{count}{self._code}").pack
        # Only these are stored, so that peers cannot make the dict grow.
        if count <= 256:
            self[count] = packer
        return packer


#: Global names of generated code.
_NAMESPACE: Final[dict[str, Any]] = {
    "Malformed": Malformed,
    "UV": _Varints((value, encode_varint(value)) for value in range(256)),
    "varint": decode_varint,
    "skip_tags": skip_tags,
    "split_records": split_records,
    "check_uuid": check_uuid,
    "unpack_from": struct.unpack_from,
    "new": object.__new__,
    "NO_UUID": NO_UUID,
    "PACK_t": _Packers("?"),
    **{f"PACK_{code}": _Packers(code) for code in "bhHiIqd"},
}


# --- generated functions --------------------------------------------------------------


class _Source:
    """Lines of a function, each with the field to which it belongs."""

    def __init__(self, signature: str) -> None:
        self.lines = [signature]
        #: For each line, the names of its field and of the structs around it.
        self.fields = [""]
        #: The field for which code is generated now.
        self.path: list[str] = []
        #: Indentation of the next line.
        self.depth = 1
        #: Global names of the function: the common ones and its constants.
        self.names: dict[str, Any] = dict(_NAMESPACE)
        #: Number of temporary variables so far.
        self._count = 0

    def add(self, line: str) -> None:
        self.lines.append("    " * self.depth + line)
        self.fields.append(".".join(self.path))

    def temporary(self, stem: str) -> str:
        """Return an unused variable name. Otherwise, inlined structs would share names."""
        self._count += 1
        return f"{stem}{self._count}"

    def constant(self, stem: str, value: Any) -> str:
        """Return the global name of an object that has no literal form."""
        # The same class or default is used for many fields.
        for name, existing in self.names.items():
            if existing is value:
                return name
        name = f"{stem}_{len(self.names)}"
        self.names[name] = value
        return name

    def function(self, filename: str) -> Callable[..., Any]:
        # The code is generated from the tables of this package and contains no foreign text.
        exec(compile("\n".join(self.lines) + "\n", filename, "exec"), self.names)
        function: Callable[..., Any] = self.names[
            self.lines[0].partition("(")[0].removeprefix("def ")
        ]
        return function


class _Block:
    """A context manager. It indents the lines that are added inside its `with` block."""

    def __init__(self, source: _Source, line: str) -> None:
        self._source = source
        source.add(line)

    def __enter__(self) -> None:
        self._source.depth += 1

    def __exit__(self, *_: object) -> None:
        self._source.depth -= 1


class _Compiler:
    """The common part of both directions: one message in one version."""

    def __init__(
        self, schema: Struct, version: int, flexible: bool, signature: str
    ) -> None:
        self.schema = schema
        self.version = version
        self.flexible = flexible
        self.has_records = has_records(schema)
        self.source = _Source(signature)
        self.add = self.source.add

    def block(self, line: str) -> _Block:
        return _Block(self.source, line)

    def min_bytes(self, field: Field, element: bool = False) -> int:
        """Return the fewest bytes of a field, or of one element of an array."""
        # An empty array, bytes or text has only its count: a varint in flexible
        # versions.
        if field.is_array and not element:
            if self.flexible:
                return 1
            return 4
        if field.struct:
            # A null struct is one byte.
            if field.is_nullable_in(self.version) and not element:
                return 1
            inner = sum(
                self.min_bytes(inner) for inner in field.struct.untagged(self.version)
            )
            # A struct of a flexible version ends with its tagged section.
            return inner + self.flexible
        if field.type in _FIXED:
            return struct.calcsize(">" + _FIXED[field.type])
        if self.flexible:
            return 1
        if field.type == "string":
            return 2
        return 4

    def tagged(self, schema: Struct) -> list[Field]:
        if self.flexible:
            return schema.tagged(self.version)
        return []


class Decoder(_Compiler):
    """Generates `decode(data, pos, size, left)`, which returns the value and the
    remaining number of allowed elements of arrays.
    """

    def __init__(self, schema: Struct, version: int, flexible: bool) -> None:
        super().__init__(
            schema, version, flexible, "def decode(data, pos, size, left):"
        )
        #: Variables of consecutive fields of fixed size, and their format. One unpack
        #: reads them, when a field of another kind follows.
        self.targets: list[str] = []
        self.format = ">"
        value = self.source.temporary("v")
        self.fill(schema, value)
        self.flush()
        self.add(f"return {value}, left")

    def fixed(self, code: str, target: str) -> None:
        self.targets.append(target)
        self.format += code

    def flush(self) -> None:
        if self.targets:
            # One call for all of them: a call takes more time than the fields.
            packing = struct.Struct(self.format)
            # The name contains the format, so that equal formats share one function.
            name = "U" + self.format[1:].replace("?", "t")
            self.source.names[name] = packing.unpack_from
            self.add(f"{', '.join(self.targets)}, = {name}(data, pos)")
            self.add(f"pos += {packing.size}")
            self.targets = []
            self.format = ">"

    def fill(self, schema: Struct, value: str) -> None:
        """Create a value of a struct and fill all its fields."""
        # object.__new__ skips the constructor, because all fields are set below.
        self.add(f"{value} = new({self.source.constant('C', schema.cls)})")
        untagged = schema.untagged(self.version)
        tagged = self.tagged(schema)
        # Fields that this version does not have, and tagged fields, keep their defaults.
        for field in schema.fields:
            if field not in untagged:
                self.add(f"{value}.{field.name} = {self.default(field)}")
        for field in untagged:
            self.source.path.append(field.name)
            self.field(field, f"{value}.{field.name}")
            self.source.path.pop()
        if self.flexible:
            self.flush()
            self.tags(tagged, value)

    def default(self, field: Field) -> str:
        if field.default is not ...:
            if field.default is NO_UUID:
                return "NO_UUID"
            return repr(field.default)
        if field.is_array:
            return "[]"
        assert field.struct
        if field.tag is not None:
            return self.source.constant("D", field.struct.shared_default)
        return f"{self.source.constant('C', field.struct.cls)}()"

    def tags(self, tagged: list[Field], value: str) -> None:
        if not tagged:
            # Usually the section is empty: one byte, which is 0.
            with self.block("if data[pos]:"):
                self.add("pos = skip_tags(data, pos, size)")
            with self.block("else:"):
                self.add("pos += 1")
            return
        count, tag, end = (
            self.source.temporary(stem) for stem in ("count", "tag", "end")
        )
        self.add(f"{count}, pos = varint(data, pos)")
        with self.block(f"for _ in range({count}):"):
            self.add(f"{tag}, pos = varint(data, pos)")
            self.add(f"{end}, pos = varint(data, pos)")
            self.add(f"{end} += pos")
            with self.block(f"if {end} > size:"):
                self.add(
                    f"raise Malformed('a tagged field is cut off', f'{{{end} - pos}} bytes', size - pos)"
                )
            keyword = "if"
            for field in tagged:
                self.source.path.append(field.name)
                with self.block(f"{keyword} {tag} == {field.tag}:"):
                    self.field(field, f"{value}.{field.name}")
                    self.flush()
                    # Otherwise, the remaining bytes would be ignored.
                    with self.block(f"if pos != {end}:"):
                        self.add(
                            f"raise Malformed('a tagged field differs from its declared size', {end}, pos)"
                        )
                keyword = "elif"
                self.source.path.pop()
            # An unknown tag is skipped, because newer peers may send it.
            self.add(f"pos = {end}")

    def field(self, field: Field, target: str) -> None:
        if field.is_array:
            self.array(field, target)
        elif field.struct:
            self.inner_struct(field, target)
        elif field.type in _FIXED:
            self.fixed(_FIXED[field.type], target)
        else:
            self.length_prefixed(field.type, target, field.is_nullable_in(self.version))

    def inner_struct(self, field: Field, target: str) -> None:
        assert field.struct
        value = self.source.temporary("v")
        self.flush()
        if not field.is_nullable_in(self.version):
            self.fill(field.struct, value)
            self.flush()
            self.add(f"{target} = {value}")
            return
        self.add("pos += 1")
        # A nullable struct begins with one signed byte: -1 is null, and 1 a value.
        with self.block("if data[pos - 1] > 127:"):
            self.add(f"{target} = None")
        with self.block("else:"):
            self.fill(field.struct, value)
            self.flush()
            self.add(f"{target} = {value}")

    def length(self, code: str) -> None:
        """Read a length into n: -1 for null."""
        if not self.flexible:
            self.fixed(code, "n")
            self.flush()
            return
        self.flush()
        # A varint of one byte is the usual case. 0 is null, so the count is one less.
        self.add("n = data[pos] - 1")
        self.add("pos += 1")
        # The first byte was 128 or more, so the varint has more bytes.
        with self.block("if n > 126:"):
            self.add("n, pos = varint(data, pos - 1)")
            self.add("n -= 1")

    def length_prefixed(self, type_: str, target: str, nullable: bool) -> None:
        """Read a string, bytes or records."""
        self.length("h" if type_ == "string" else "i")
        if nullable:
            with self.block("if n == -1:"):
                self.add(f"{target} = None")
            with self.block("else:"):
                self.content(type_, target)
        else:
            self.content(type_, target)

    def content(self, type_: str, target: str) -> None:
        self.add("end = pos + n")
        # The lower bound matters, because a negative length would move `pos` backwards.
        with self.block("if not pos <= end <= size:"):
            self.add(
                f"raise Malformed('{type_} of {{}} bytes'.format(n), f'0 to {{size - pos}}', n)"
            )
        if type_ == "string":
            self.add(
                f"{target} = "
                + (
                    "str(data[pos:end], 'utf-8')"
                    if self.has_records
                    else "data[pos:end].decode()"
                )
            )
        elif type_ == "bytes":
            self.add(
                f"{target} = "
                + ("bytes(data[pos:end])" if self.has_records else "data[pos:end]")
            )
        else:
            self.add(f"{target} = data[pos:end]")
        self.add("pos = end")

    def array(self, field: Field, target: str) -> None:
        self.length("i")
        if field.is_nullable_in(self.version):
            with self.block("if n == -1:"):
                self.add(f"{target} = None")
            with self.block("else:"):
                self.elements(field, target)
        else:
            self.elements(field, target)

    def elements(self, field: Field, target: str) -> None:
        min_bytes = self.min_bytes(field, element=True)
        # Otherwise, a few bytes could request an array of 2^31 elements.
        assert min_bytes > 0, field.name
        with self.block(f"if not 0 <= n * {min_bytes} <= size - pos:"):
            self.add(
                f"raise Malformed(f'an array of {{n}} elements', f'0 to {{(size - pos) // {min_bytes}}}', n)"
            )
        # Nested arrays could multiply a small request into millions of objects.
        self.add("left -= n")
        with self.block("if left < 0:"):
            self.add(
                "raise Malformed(f'an array of {n} elements, too many in all', f'{left + n} at most', n)"
            )
        code = _FIXED.get(field.type)
        # One unpack for all elements. A uuid ("16s") has a count in its code already.
        if code and len(code) == 1:
            self.add(
                f"{target} = list(unpack_from(f'>{{n}}{code}', data, pos)) if n else []"
            )
            self.add(f"pos += n * {min_bytes}")
            return
        elements = self.source.temporary("a")
        self.add(f"{target} = {elements} = []")
        with self.block("for _ in range(n):"):
            value = self.source.temporary("v")
            if field.struct:
                self.fill(field.struct, value)
            elif code:
                self.fixed(code, value)
            else:
                self.length_prefixed(field.type, value, nullable=False)
            self.flush()
            self.add(f"{elements}.append({value})")


class Encoder(_Compiler):
    """Generates `encode(v0)`, which returns a list of buffers: encoded fields, and the given
    records.
    """

    def __init__(self, schema: Struct, version: int, flexible: bool) -> None:
        super().__init__(schema, version, flexible, "def encode(v0):")
        #: Expressions for the next `out +=`, until a loop or a branch follows.
        self.parts: list[str] = []
        #: Consecutive fields of fixed size for the next pack, and their format.
        self.arguments: list[str] = []
        self.format = ">"
        self.add("out = []")
        if self.has_records:
            self.add("buffers = []")
        self.struct(schema, "v0")
        self.flush()
        if self.has_records:
            self.add("buffers.append(b''.join(out))")
            self.add("return buffers")
        else:
            self.add("return [b''.join(out)]")

    def fixed(self, code: str, argument: str) -> None:
        self.arguments.append(argument)
        self.format += code

    def part(self, expression: str) -> None:
        self.close_pack()
        self.parts.append(expression)

    def close_pack(self) -> None:
        if self.arguments:
            name = "P" + self.format[1:].replace("?", "t")
            self.source.names[name] = struct.Struct(self.format).pack
            self.parts.append(f"{name}({', '.join(self.arguments)})")
        # Only pad bytes, of empty tagged sections.
        elif len(self.format) > 1:
            self.parts.append(repr(bytes(len(self.format) - 1)))
        self.arguments = []
        self.format = ">"

    def flush(self) -> None:
        self.close_pack()
        if self.parts:
            self.add(f"out += ({', '.join(self.parts)},)")
            self.parts = []

    def struct(self, schema: Struct, value: str) -> None:
        for field in schema.untagged(self.version):
            self.source.path.append(field.name)
            self.field(field, f"{value}.{field.name}")
            self.source.path.pop()
        if self.flexible:
            self.tags(self.tagged(schema), value)

    def tags(self, tagged: list[Field], value: str) -> None:
        if not tagged:
            # The empty tagged section is one zero byte of the current pack.
            self.format += "x"
            return
        self.flush()
        tests = []
        for field in tagged:
            name = self.source.temporary("t")
            self.add(f"{name} = {value}.{field.name}")
            tests.append((name, self.is_default(field, name)))
        # If all tagged fields have their defaults, the section is one zero byte.
        with self.block(f"if {' and '.join(test for _, test in tests)}:"):
            self.add("out += (b'\\0',)")
        with self.block("else:"):
            outer = self.source.temporary("outer")
            sections = self.source.temporary("sections")
            # Each field is encoded on its own first, because its size precedes it.
            self.add(f"{outer}, {sections} = out, []")
            for field, (name, test) in zip(tagged, tests):
                self.source.path.append(field.name)
                with self.block(f"if not {test}:"):
                    self.add("out = []")
                    self.field(field, name)
                    self.flush()
                    self.add("body = b''.join(out)")
                    self.add(f"{sections} += (UV[{field.tag}], UV[len(body)], body)")
                self.source.path.pop()
            self.add(f"out = {outer}")
            self.add(f"out += (UV[len({sections}) // 3], *{sections})")

    def is_default(self, field: Field, name: str) -> str:
        if field.default is None:
            return f"{name} is None"
        if field.is_array:
            if field.is_nullable_in(self.version):
                return f"{name} == []"
            return f"(not {name})"
        if field.struct:
            # A new value has the shared default itself, so `is` usually decides.
            shared_default = self.source.constant("D", field.struct.shared_default)
            return f"({name} is {shared_default} or {name} == {shared_default})"
        if field.type == "uuid":
            default = "NO_UUID"
        else:
            default = repr(field.default)
        return f"{name} == {default}"

    def field(self, field: Field, value: str) -> None:
        nullable = field.is_nullable_in(self.version)
        if field.is_array:
            self.array(field, value, nullable)
        elif field.struct:
            self.inner_struct(field.struct, value, nullable)
        elif field.type == "uuid":
            self.fixed("16s", f"check_uuid({value})")
        elif field.type in _FIXED:
            self.fixed(_FIXED[field.type], value)
        else:
            self.length_prefixed(field.type, value, nullable)

    def inner_struct(self, schema: Struct, value: str, nullable: bool) -> None:
        name = self.source.temporary("v")
        self.add(f"{name} = {value}")
        if not nullable:
            self.struct(schema, name)
            return
        self.flush()
        with self.block(f"if {name} is None:"):
            self.add("out += (b'\\xff',)")
        with self.block("else:"):
            # One byte precedes a nullable struct: 1 for a value, 0xFF (-1) for null.
            self.part("b'\\1'")
            self.struct(schema, name)
            self.flush()

    def length(self, code: str, count: str) -> None:
        """Write a length. `count` is an expression for the length plus one, or 0 for null."""
        if self.flexible:
            self.part(f"UV[{count}]")
        else:
            self.fixed(
                code,
                count.removesuffix(" + 1")
                if count.endswith(" + 1")
                else f"{count} - 1",
            )

    def length_prefixed(self, type_: str, value: str, nullable: bool) -> None:
        if type_ == "records":
            self.records(value, nullable)
            return
        name = self.source.temporary("t")
        count = f"len({name}) + 1"
        encoded = value
        if type_ == "string":
            encoded = f"{value}.encode()"
        if nullable:
            self.add(f"{name} = {value}")
            with self.block(f"if {name} is None:"):
                self.add(f"{name}, {name}n = b'', 0")
            with self.block("else:"):
                if type_ == "string":
                    self.add(f"{name} = {name}.encode()")
                self.add(f"{name}n = {count}")
            count = f"{name}n"
        else:
            self.add(f"{name} = {encoded}")
        self.length("h" if type_ == "string" else "i", count)
        self.part(name)

    def records(self, value: str, nullable: bool) -> None:
        name = self.source.temporary("r")
        self.add(f"{name} = {value}")
        if nullable:
            with self.block(f"if {name} is None:"):
                self.add(f"{name}, {name}n = (), 0")
        # Bytes need no call of split_records().
        with self.block(f"{'el' if nullable else ''}if {name}.__class__ is bytes:"):
            self.add(f"{name}n = len({name}) + 1")
            self.add(f"{name} = ({name},)")
        with self.block("else:"):
            self.add(f"{name}, {name}n = split_records({name})")
            self.add(f"{name}n += 1")
        self.length("i", f"{name}n")
        self.flush()
        # Empty records have no buffer of their own.
        with self.block(f"if {name}n > 1:"):
            self.add("buffers.append(b''.join(out))")
            self.add(f"buffers += {name}")
            self.add("out = []")

    def array(self, field: Field, value: str, nullable: bool) -> None:
        name = self.source.temporary("a")
        count = f"len({name}) + 1"
        self.add(f"{name} = {value}")
        if nullable:
            with self.block(f"if {name} is None:"):
                self.add(f"{name}, {name}n = (), 0")
            with self.block("else:"):
                self.add(f"{name}n = {count}")
            count = f"{name}n"
        self.length("i", count)
        code = _FIXED.get(field.type)
        if code and len(code) == 1:
            self.part(f"PACK_{code.replace('?', 't')}[len({name})](*{name})")
            return
        self.flush()
        element = self.source.temporary("v")
        with self.block(f"for {element} in {name}:"):
            if field.struct:
                self.struct(field.struct, element)
            elif code:
                self.fixed(code, f"check_uuid({element})")
            else:
                self.length_prefixed(field.type, element, nullable=False)
            self.flush()


def has_records(schema: Struct) -> bool:
    """Return whether a message contains records. It is then decoded from a view of the
    frame and encoded into several buffers.
    """
    return any(
        field.type == "records" or (field.struct and has_records(field.struct))
        for field in schema.fields
    )
