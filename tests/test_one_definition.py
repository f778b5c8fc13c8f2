"""One definition rule: a name in the library's headers means the same in every source.

Sources that include different headers are linked into one library, and no compiler or linker
checks whether a name has two meanings there. So this reads the headers: which types, constants,
enumerators and functions they define at namespace scope, and how.
"""

import collections
import itertools
import pathlib
import re

import pytest

_CUDA = pathlib.Path(__file__).resolve().parent.parent / "cuda"
_TOKEN = re.compile(r'"(?:\\.|[^"\\])*"|\'(?:\\.|[^\'\\])*\'|[A-Za-z_]\w*|\d[\w.\']*|::|->|&&|\S')
_TYPES = ("struct", "class", "union", "enum")
_WITH_ARGUMENTS = (
    "__launch_bounds__", "__cluster_dims__", "__attribute__", "alignas", "decltype",
)  # fmt: skip
_CLOSING = {"{": "}", "(": ")", "[": "]"}


def tokens_of(text):
    """The tokens of C++ text, without comments and preprocessor directives."""
    text = re.sub(r"//[^\n]*|/\*.*?\*/", " ", text, flags=re.S)
    text = re.sub(r"^[ \t]*#(?:[^\n]*\\\n)*[^\n]*", " ", text, flags=re.M)
    return _TOKEN.findall(text)


def macros_of(text):
    """(name, definition) of every macro."""
    for line in re.findall(r"^[ \t]*#[ \t]*define[ \t]+((?:[^\n]*\\\n)*[^\n]*)", text, flags=re.M):
        name, *rest = _TOKEN.findall(re.sub(r"//[^\n]*", "", line).replace("\\\n", " "))
        yield ("macro", name), tuple(rest)


def end_of(tokens, start):
    """Behind the bracket that closes the one at `start`."""
    opening, depth = tokens[start], 0
    for i in range(start, len(tokens)):
        depth += (tokens[i] == opening) - (tokens[i] == _CLOSING[opening])
        if depth == 0:
            return i + 1
    raise AssertionError(f"no closing bracket for {tokens[start : start + 12]}")


def without_template_head(tokens):
    """(template parameters, the rest)."""
    head = []
    while tokens[:1] == ["template"]:
        depth, i = 0, 1
        while True:
            depth += {"<": 1, ">": -1}.get(tokens[i], 0)
            i += 1
            if depth == 0:
                break
        head, tokens = head + tokens[:i], tokens[i:]
    return head, tokens


def name_before(tokens):
    """The last identifier, arrays' sizes and attributes left out."""
    depth = 0
    for token in reversed(tokens):
        depth += {"]": 1, "[": -1}.get(token, 0)
        if depth == 0 and re.match(r"[A-Za-z_]", token):
            return token
    raise AssertionError(f"no name in {tokens}")


def parameter_types(tokens):
    """The parameters of a list without their names and defaults."""
    parameters, depth, current = [], 0, []
    for token in [*tokens, ","]:
        depth += {"(": 1, "<": 1, "[": 1, "{": 1, ")": -1, ">": -1, "]": -1, "}": -1}.get(token, 0)
        if token != "," or depth > 0:
            current.append(token)
            continue
        if "=" in current:
            current = current[: current.index("=")]
        if len(current) > 1 and re.match(r"[A-Za-z_]", current[-1]):
            current = current[:-1]
        parameters.append(" ".join(current))
        current = []
    return tuple(parameters)


def definitions_of(tokens, namespace=()):
    """((kind, name, ...), tokens) of what is defined at the scope of named namespaces."""
    i = 0
    while i < len(tokens):
        if tokens[i] == ";":
            i += 1
            continue
        if tokens[i] == "extern" and tokens[i + 2 : i + 3] == ["{"]:
            inner_end = end_of(tokens, i + 2)
            yield from definitions_of(tokens[i + 3 : inner_end - 1], namespace)
            i = inner_end
            continue
        # A declaration: up to a semicolon, or the end of a function's body.
        start, has_equals, parentheses, braces = i, False, None, None
        i += len(without_template_head(tokens[i:])[0])
        kind = tokens[i]
        while i < len(tokens) and tokens[i] != ";":
            first = i
            has_equals |= tokens[i] == "=" and parentheses is None
            if tokens[i] not in _CLOSING:
                i += 1
                continue
            i = end_of(tokens, i)
            if tokens[first] == "(" and tokens[first - 1] in _WITH_ARGUMENTS:
                continue
            if tokens[first] == "(" and parentheses is None and not has_equals:
                parentheses = first - start
            if tokens[first] == "{":
                braces = braces or (first - start, i - start)
                is_function = parentheses is not None and kind not in _TYPES and not has_equals
                if kind == "namespace" or is_function:
                    break
        declaration = tokens[start:i]
        yield from _definition(declaration, namespace, has_equals, parentheses, braces)


def _definition(tokens, namespace, has_equals, parentheses, braces):
    if tokens[0] == "namespace":
        if braces is None:  # another name of one
            return
        name = [t for t in tokens[1 : braces[0]] if t != "::"]
        if name:  # what an unnamed one has is its source's alone
            inner = tokens[braces[0] + 1 : braces[1] - 1]
            yield from definitions_of(inner, (*namespace, *name))
        return
    head, rest = without_template_head(tokens)
    scope = "::".join(namespace)
    definition = tuple(tokens)
    if rest[0] in _TYPES and parentheses is None:
        if braces is None:
            return
        before = tokens[len(head) + 1 : braces[0]]
        before = before[: before.index(":")] if ":" in before else before
        name = " ".join(t for t in before if t not in ("class", "struct", "final"))
        yield ("type", scope, name), definition
        if rest[0] == "enum" and rest[1] not in ("class", "struct"):
            for part in parts_of(tokens[braces[0] + 1 : braces[1] - 1]):
                yield ("name", scope, part[0]), (name, *part)
    elif rest[0] == "using":
        if "=" in rest and rest[1] != "namespace":
            yield ("type", scope, rest[1]), definition
    elif rest[0] == "typedef":
        yield ("type", scope, name_before(rest[: rest.index("__attribute__")])), definition
    elif rest[0] == "static_assert" or (rest[0].isupper() and rest[1] == "("):
        return  # no definition of a name, or a macro's
    elif parentheses is not None:
        if braces is None and "default" not in rest:
            return
        name = name_before(tokens[:parentheses])
        end = end_of(tokens, parentheses)
        types = parameter_types(tokens[parentheses + 1 : end - 1])
        yield ("function", scope, name, " ".join(head), types), definition
    elif has_equals or braces is not None or "constexpr" in rest:
        stop = min(rest.index(t) if t in rest else len(rest) for t in ("=", "{"))
        name = name_before(rest[:stop])
        kind, declarators = rest[: rest.index(name)], rest[rest.index(name) :]
        for part in parts_of(declarators):
            # Else the comma was one between template arguments.
            if part[0] == name or part[1:2] in (["="], ["{"], ["["]):
                yield ("name", scope, part[0]), (*head, *kind, *part)


def parts_of(tokens):
    """The parts of a list that commas separate."""
    depth, part = 0, []
    for token in [*tokens, ","]:
        depth += {"(": 1, "{": 1, ")": -1, "}": -1}.get(token, 0)
        if token == "," and depth == 0:
            if part:
                yield part
            part = []
        else:
            part.append(token)


def all_definitions(texts):
    """By key, the different definitions, each with its files; of {file: text}.

    Several in one file, which the preprocessor chooses from, count as one.
    """
    found = collections.defaultdict(lambda: collections.defaultdict(list))
    for file, text in texts.items():
        here = collections.defaultdict(tuple)
        for key, definition in (*definitions_of(tokens_of(text)), *macros_of(text)):
            here[key] += (definition,)
        for key, definitions in here.items():
            found[key][definitions].append(file)
    return found


def conflicts(texts):
    """Sentences about names that are defined differently."""
    return [
        f"{' '.join(map(str, key))}: {sorted(itertools.chain(*definitions.values()))}"
        for key, definitions in all_definitions(texts).items()
        if len(definitions) > 1
    ]


def _sources():
    files = [p for p in sorted(_CUDA.rglob("*")) if p.suffix in (".h", ".cuh", ".cc")]
    return {str(p.relative_to(_CUDA)): p.read_text() for p in files}


def test_no_name_has_two_meanings():
    assert not conflicts(_sources())


def test_device_headers_have_no_functions_of_their_own():
    """A static one is another function in each source, and so is an inline one that calls it."""
    for file, text in _sources().items():
        if file.endswith(".cuh"):
            assert not re.search(r"^static (?!_assert)\w|^namespace \{", text, flags=re.M), file


def test_definitions_are_found():
    found = all_definitions(_sources())
    names = {key[:3] for key in found}
    assert ("type", "jax_flash", "Backward") in names
    assert ("type", "jax_flash", "BackwardWorkspace") in names
    assert ("name", "jax_flash::sm90", "kMayCompute") in names
    assert ("name", "jax_flash", "kSplitKeys") in names
    assert ("function", "jax_flash", "ceil_div") in names
    assert ("macro", "JAX_FLASH_HOST_DEVICE") in found
    assert sum(len(definitions) for definitions in found.values()) > 750


@pytest.mark.parametrize(
    ("one", "other", "differs"),
    [
        ("struct A { int x; };", "struct A { int y; };", True),
        ("struct A { int x; };", "struct A { int x; };  // the same", False),
        ("struct A { int x; };", "using A = int;", True),
        ("template <int k> struct A {};", "template <> struct A<1> { int x; };", False),
        ("enum E : int { kA = 1, kB };", "inline constexpr int kB = 1;", True),
        ("enum E { kA = 1 };", "enum F { kA = 2 };", True),
        ("enum class E { kA = 1 };", "enum class F { kA = 2 };", False),
        ("inline constexpr int kA = 1;", "inline constexpr long kA = 1;", True),
        ("inline constexpr int kA = 1, kC[2] = {0, 1};", "inline constexpr int kC[2] = {};", True),
        ("inline constexpr int kA = 1, kC = 2;", "inline constexpr int kC = 2;", False),
        ("inline int f(int a) { return a; }", "inline int f(int b) { return b + 1; }", True),
        ("inline int f(int a) { return a; }", "inline int f(float b) { return 1; }", False),
        ("inline int f(int a) { return a; }", "int f(int a);", False),
        ("namespace { int f() { return 1; } }", "int f() { return 2; }", False),
        ("namespace b { struct A {}; }", "struct A { int x; };", False),
        ("#define M 1\n", "#define M 2\n", True),
    ],
)
def test_conflicts_are_found(one, other, differs):
    texts = {"one": f"namespace a {{ {one}\n }}", "other": f"namespace a {{ {other}\n }}"}
    if "#" in one:
        texts = {"one": one, "other": other}
    assert len(conflicts(texts)) == (1 if differs else 0)
