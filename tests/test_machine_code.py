"""What machine_code.py reads of a library and says of a difference; CI compares the library."""

import struct

import machine_code


def elf(sections):
    """A 64-bit ELF file of these (name, content)."""
    names = b"\0" + b"".join(name + b"\0" for name, _ in sections) + b".shstrtab\0"
    body, headers, offset, start = b"", [struct.pack("<IIQQQQIIQQ", *[0] * 10)], 1, 64
    for name, content in (*sections, (b".shstrtab", names)):
        headers.append(
            struct.pack("<IIQQQQIIQQ", offset, 1, 0, 0, start + len(body), len(content), 0, 0, 1, 0)
        )
        body, offset = body + content, offset + len(name) + 1
    header = b"\x7fELF\x02\x01" + bytes(10) + bytes(24)
    header += struct.pack("<Q", start + len(body)) + bytes(10)
    header += struct.pack("<HHH", 64, len(headers), len(headers) - 1)
    return header + body + b"".join(headers)


def test_kernels_of_a_file():
    one = machine_code.kernels_of(elf([(b".text.f", b"add"), (b".nv.constant0.f", bytes(8))]))
    renamed = machine_code.kernels_of(elf([(b".text.g", b"add"), (b".nv.constant0.g", bytes(9))]))
    assert list(one) == ["f"]
    assert list(renamed) == ["g"]
    assert one["f"] == renamed["g"]  # neither names nor the size of the parameters matter
    other = machine_code.kernels_of(elf([(b".text.f", b"sub")]))
    constants = machine_code.kernels_of(elf([(b".text.f", b"add"), (b".nv.constant4.f", b"1")]))
    assert len({one["f"], other["f"], constants["f"]}) == 3


def test_compiler_of_a_file():
    note = b"ptxas\0Cuda compilation tools, release 13.0, V13.0.88\0"
    assert machine_code.compiler_of(elf([(b".note.nv.tkinfo", note)])) == "13.0.88"
    assert machine_code.compiler_of(elf([(b".text.f", b"add")])) == "unknown"


def test_differences_are_of_hashes_and_not_of_names():
    listed = {("1", "sm_80"): (2, "f<1>"), ("2", "sm_80"): (1, "g")}
    assert machine_code.differences(listed, {**listed, ("1", "sm_80"): (2, "h")}) == []
    found = {("1", "sm_80"): (1, "f<1>"), ("3", "sm_80"): (1, "g")}
    assert machine_code.differences(listed, found) == [
        "  2 ->   1  sm_80  f<1>",
        "  1 ->   0  sm_80  g",
        "  0 ->   1  sm_80  g",
    ]


def test_the_list_names_each_kernel():
    text = machine_code.PATH.read_text()
    compiler, listed = machine_code.parse(text)
    assert compiler
    assert len(listed) == sum(line[0] not in "#p" for line in text.splitlines())
    for (code, architecture), (count, name) in listed.items():
        assert len(code) == 16
        assert architecture.startswith("sm_")
        assert count > 0
        assert "kernel" in name
