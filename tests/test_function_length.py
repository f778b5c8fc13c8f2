"""Every function of the native code fits on two screens: 80 lines, from brace to brace.

The scanner reads text and needs no compiler. A lambda belongs to the function around it.
"""

import pathlib
import re

import pytest

_CUDA = pathlib.Path(__file__).resolve().parent.parent / "cuda"
_LIMIT = 80
# Comments, raw strings, strings, characters, and preprocessor directives with continuation lines.
# A ' between digits separates them.
_HIDDEN = re.compile(
    r'//[^\n]*|/\*.*?\*/|R"([^(\s]*)\(.*?\)\1"|"(?:\\.|[^"\\\n])*"'
    r"|(?<![0-9a-fA-F])'(?:\\.|[^'\\\n])*'|^[ \t]*#(?:[^\n]*\\\n)*[^\n]*",
    flags=re.S | re.M,
)
_TEMPLATE = re.compile(r"\btemplate\s*<")
_SCOPE = re.compile(r"(?:namespace|struct|class|union|extern)\b")
_END = re.compile(r"[;}]|\b(?:public|private|protected)\s*:(?!:)")
_NAME = re.compile(r"(operator\s*[^\s\w(]+|operator\s+[\w:]+|~?\w+)\s*$")
_CLOSING = {"{": "}", "(": ")", "<": ">"}
_NO_NAMES = ("__launch_bounds__", "__attribute__", "alignas", "decltype", "noexcept", "requires")


def without_hidden(text):
    """The text with comments, strings and directives as blanks; lines stay where they are."""
    return _HIDDEN.sub(lambda match: re.sub(r"[^\n]", " ", match[0]), text)


def closing(text, start):
    """The place of the bracket that closes the one at `start`; "<" and ">" count outside others."""
    opening, depth, inner = text[start], 0, 0
    for i in range(start, len(text)):
        if opening == "<" and text[i] in "([{)]}":
            inner += 1 if text[i] in "([{" else -1
        if inner == 0:
            depth += (text[i] == opening) - (text[i] == _CLOSING[opening])
        if depth == 0:
            return i
    raise AssertionError(f"nothing closes {text[start : start + 60]!r}")


def without_template_heads(head):
    while match := _TEMPLATE.search(head):
        end = closing(head, match.end() - 1)
        head = head[: match.start()] + head[end + 1 :]
    return head.strip()


def function_name(head):
    """The name that a head in front of a brace declares as a function's, or None.

    The brace may also begin a scope, an enumeration, a variable's value, or that of a member in a
    constructor's list.
    """
    head = re.sub(r"\boperator\s*\(\s*\)", "operator_call", without_template_heads(head))
    depth = 0
    for i, letter in enumerate(head):
        if letter == "(" and depth == 0:
            match = _NAME.search(head[:i])
            if match and match[1] not in _NO_NAMES:
                end = closing(head, i)
                members = re.match(r"\s*(?:noexcept\s*)?:(?!:)", head[end + 1 :])
                in_list = members and not head.endswith((")", "}"))
                return None if in_list else re.sub(r"\s+", "", match[1])
        depth += (letter in "([") - (letter in ")]")
        if letter == "=" and depth == 0 and not re.search(r"operator\s*[^\w\s]*$", head[:i]):
            # A lambda at namespace scope is a function.
            match = re.match(r"([^=]*?)(\w+)\s*=\s*\[[^\]]*\]\s*[({]?", head)
            return match[2] if match else None
    return None


def functions_of(text):
    """(name, line of the opening brace, lines up to the closing brace) of every function."""
    text = without_hidden(text)
    functions, i, start = [], 0, 0
    while i < len(text):
        if match := _END.match(text, i):
            start = i = match.end()
        elif text[i] == "(":
            i = closing(text, i) + 1
        elif text[i] == "{":
            head = text[start:i].strip()
            name = function_name(head)
            end = closing(text, i)
            if name is not None:
                line = text.count("\n", 0, i) + 1
                functions.append((name, line, text.count("\n", i, end) + 1))
                start = i = end + 1
            elif _SCOPE.match(without_template_heads(head)):
                start = i = i + 1
            else:
                i = end + 1
        else:
            i += 1
    return functions


def too_long(text, file):
    return [
        f"{file}:{line}: {name}: {length} lines"
        for name, line, length in functions_of(text)
        if length > _LIMIT
    ]


def _sources():
    return [p for p in sorted(_CUDA.rglob("*")) if p.suffix in (".h", ".cc", ".cuh", ".cu")]


def test_no_function_is_longer_than_80_lines():
    found = [line for p in _sources() for line in too_long(p.read_text(), p.relative_to(_CUDA))]
    assert not found, "split these functions into named steps:\n" + "\n".join(found)


def test_functions_are_found():
    names = {name for path in _sources() for name, _, _ in functions_of(path.read_text())}
    assert {"choose_forward", "ceil_div", "backward_kernel", "DecodeWalk", "mbarrier_wait"} <= names
    assert len(names) > 500


_SHORT = "{\n" + "  a = f(b);\n" * (_LIMIT - 2) + "}\n"
_BODY = _SHORT.replace("{", "{\n")


@pytest.mark.parametrize(
    ("text", "name"),
    [
        (f"inline int name(int a) {_BODY}", "name"),
        (f"template <typename A = B<1>, bool b = (1 > 0)>\nint name() const {_BODY}", "name"),
        (f"__global__ void __launch_bounds__(C::kA, 1)\n    name(const A a) {_BODY}", "name"),
        (f"namespace a {{ struct B : C<1> {{ public: void name() {_BODY} }}; }}", "name"),
        (f"struct B {{ B(int x) : x(x), y{{x, 1}}, z(2) {_BODY} int x; }};", "B"),
        (f"bool operator==(A a, A b) {_BODY}", "operator=="),
        (f"struct A {{ int operator()(int a) const {_BODY} }};", "operator_call"),
        (f"auto name() -> int {_BODY}", "name"),
        (f"void name() {{ const auto f = [&](int a) {_BODY}; }}", "name"),
        (f"inline constexpr auto name = [](int a) {_BODY};", "name"),
        (f"int b = 1'000; const char a = '{{'; /* {{ */ // {{\nvoid name() {_BODY}", "name"),
        (f'const char *a = "\\"}}", *b = R"(")"; void name() {_BODY}', "name"),
        (f"#define M(a) \\\n  {{ a\nvoid name() {_BODY}", "name"),
        (f"const int a[] = {_BODY};", None),
        (f"enum A : int {_BODY};", None),
        (f"struct A {_BODY.replace('a = f(b)', 'void f() {}')};", None),
        (f"void name() {_SHORT}", None),
    ],
)
def test_long_functions_are_found(text, name):
    found = [line.split(": ")[1] for line in too_long(text, "file")]
    assert found == ([] if name is None else [name])
