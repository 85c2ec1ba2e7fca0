"""Finds the places of a C++ source where a fault can be planted.

It reads text, not C++: clang-format writes every operator in one way. What it takes for an expression and is none does not
compile, and plant_faults draws again.
"""
import re
from bisect import bisect

KINDS = ("operation", "bound", "order", "sign", "check")
SWITCH = "@FAULT@"  # in what is planted, the question whether this fault was chosen

NO_CODE = re.compile(r'//[^\n]*|/\*.*?\*/|^[ \t]*#(?:[^\\\n]|\\.)*|R"(\w*)\(.*?\)\1"|"(?:\\.|[^"\\\n])*"|'
                     r"(?<!\w)'(?:\\.|[^'\\\n])*'", re.DOTALL | re.MULTILINE)
SPACE, CLOSING = re.compile(r"\s*"), {"(": ")", "[": "]", "{": "}"}
# Brackets, and between what expressions stand.
STOP = re.compile(r"[()\[\]{},;?]|(?<!:):(?!:)|(?<![=!<>])=(?=\s)|\b(?:return|throw|else|do|case|co_return|co_yield)\b")
HEAD = re.compile(r"\b(if|for|while|switch|constexpr) ?$")
EXCHANGES = [  # kind, pattern, what stands there instead
    ("operation", r"(?<=[\w)\]}])\s(\+|-|\*|/|%|&&|\|\|)(?=\s)(?!\s1(?![\w.']))",
     {"+": "-", "-": "+", "*": "/", "/": "*", "%": "/", "&&": "||", "||": "&&"}),
    ("operation", r"\bhn::(Add|Sub|Mul|Min|Max)(?=\()", {"Add": "Sub", "Sub": "Add", "Mul": "Add", "Min": "Max", "Max": "Min"}),
    ("operation", r"\bstd::(min|max)(?=[(<])", {"min": "max", "max": "min"}),
    ("bound", r"(?<=[\w)\]}])\s([<>]=?)(?=\s)", {"<": "<=", "<=": "<", ">": ">=", ">=": ">"}),
    ("sign", r"(?<=[\w)\]}])\s([+-])(?=\s1(?![\w.']))", {"+": "-", "-": "+"}),
    ("sign", r"\bhn::(NegMulAdd|MulAdd)(?=\()", {"NegMulAdd": "MulAdd", "MulAdd": "NegMulAdd"}),
    ("sign", r"(?<![\w)\]}+-])(-)(?=[\w(])", {"-": ""}),
]
TEXT_CALL = re.compile(r"\b(fail|format|print|println|refuse|complain|\w+_error|static_assert|add_option|add_flag|TORCH_\w+)$")
ORDER_IS_FREE = re.compile(r"\b(min|max|Add|Mul|And|Or|Xor|Min|Max|equal|gcd|lcm|hypot|swap|if|for|while|switch)(<[^()]*>)? ?$")
ARGUMENT = re.compile(r"(?!.*[\w>&*] \w)[^,;{}]{1,40}", re.DOTALL)  # no declaration
STATEMENT = re.compile(r"^( +)([\w(*][^{};\n]*;) *$", re.MULTILINE)
NO_STATEMENT = re.compile(r"(if|for|while|else|return|throw|break|continue|goto|using|case|default|static|const|co_\w+)\b|"
                          r"[\w:<>,*& ]*[\w>&*] \w+\s*($|[=({\[,;])")
CHANGED = re.compile(r"(.*?) [-+*/|&]?= |([\w.>-]+)(?:\.|->)\w+\(")  # what is assigned, or the object of a call
# A broken invariant never comes about: whether that is checked changes nothing that the program does.
REFUSAL = re.compile(r"\s*\{?\s*(fail\(|throw (?!std::logic_error))")


class Code:
    """A source without its comments, directives and texts, with which bracket belongs to which."""

    def __init__(self, text):
        self.text = text
        self.code = NO_CODE.sub(lambda found: re.sub(r"[^\n]", "_" if found[0][0] in "\"'R" else " ", found[0]), text)
        self.stops, self.partner, stack = list(STOP.finditer(self.code)), {}, []
        self.at, self.around_next = [-1], [-1]  # around_next[i]: the bracket around what follows the stop at[i]
        for stop in self.stops:
            if stop[0] in CLOSING:
                stack.append(stop.start())
            elif stack and CLOSING[self.code[stack[-1]]] == stop[0]:
                opening = stack.pop()
                self.partner[stop.start()], self.partner[opening] = opening, stop.start()
            self.at.append(stop.start())
            self.around_next.append(stack[-1] if stack else -1)

    def around(self, place):
        """The bracket around a place, or -1."""
        return self.around_next[bisect(self.at, place - 1) - 1]

    def is_in_message(self, place):
        """Whether it belongs to an argument of a call that writes a text."""
        while (place := self.around(place)) >= 0:
            if TEXT_CALL.search(self.code, max(0, place - 40), place):
                return True
        return False

    def begin_of_expression(self, place):
        while (index := bisect(self.at, place - 1) - 2) >= 0:
            stop = self.stops[index]
            opening = self.partner.get(stop.start(), 0) if stop[0] in ")]}" else 0
            is_head = stop[0] == ")" and HEAD.search(self.code, max(0, opening - 12), opening)
            if is_head or not opening or stop[0] == "}" and not re.match(r"[\w>]", self.code[opening - 1]):
                return SPACE.match(self.code, stop.end()).end()
            place = opening
        return 0

    def end_of_expression(self, place):
        for stop in self.stops[bisect(self.at, place - 1) - 1:]:
            if stop.start() >= place:
                if stop[0] not in CLOSING:
                    return len(self.code[:stop.start()].rstrip())
                place = self.partner.get(stop.start(), stop.start()) + 1
        return len(self.code)

    def fault(self, kind, begin, end, mutated, planted=None):
        """What faults.json has of a place; `beside` is what else is on its lines."""
        original = self.text[begin:end]
        first, last = self.text.rfind("\n", 0, begin) + 1, self.text.find("\n", end)
        return {"kind": kind, "begin": begin, "original": original, "mutated": mutated,
                "planted": planted or f"({SWITCH} ? {mutated} : {original})", "beside": [self.text[first:begin], self.text[end:last]]}


def exchanged(code):
    for kind, pattern, others in EXCHANGES:
        for found in re.finditer(pattern, code.code):
            begin, end = code.begin_of_expression(found.start(1)), code.end_of_expression(found.end(1))
            yield code.fault(kind, begin, end, code.text[begin:found.start(1)] + others[found[1]] + code.text[found.end(1):end])


def arguments_swapped(code):
    commas = {}
    for found in re.finditer(r",\s", code.code):
        bracket = code.around(found.start())
        if bracket in code.partner and re.match(r"[\w>)]\(", code.code[bracket - 1:bracket + 1]):
            commas.setdefault(bracket, []).append(found.start())
    for bracket, places in commas.items():
        callee = code.code[max(0, bracket - 40):bracket]
        if ORDER_IS_FREE.search(callee) or TEXT_CALL.search(callee):
            continue
        ends = [bracket, *places, code.partner[bracket]]
        spans = [(SPACE.match(code.code, before + 1).end(), end) for before, end in zip(ends, ends[1:])]
        for (a, a_end), (b, b_end) in zip(spans, spans[1:]):
            first, second = code.text[a:a_end], code.text[b:b_end]
            if first != second and ARGUMENT.fullmatch(code.code, a, a_end) and ARGUMENT.fullmatch(code.code, b, b_end):
                begin, end = code.begin_of_expression(bracket), code.end_of_expression(bracket)
                yield code.fault("order", begin, end, code.text[begin:a] + second + code.text[a_end:b] + first + code.text[b_end:end])


def statements_swapped(code):
    found = list(STATEMENT.finditer(code.code))
    for first, second in zip(found, found[1:]):
        a, b = first[2], second[2]
        bracket, before = code.around(first.start(2)), code.code[:first.start()].rstrip()[-1:]
        if code.code[first.end():second.start()] != "\n" or first[1] != second[1] or a == b or before not in (";", "{", "}"):
            continue
        if bracket < 0 or code.code[bracket] != "{" or NO_STATEMENT.match(a) or NO_STATEMENT.match(b):
            continue
        # Of two statements that share nothing, either may be the first.
        changed = [(match := CHANGED.match(statement)) and re.escape(match[match.lastindex]) for statement in (a, b)]
        if any(what and re.search(rf"(?<!\w){what}(?!\w)", other) for what, other in zip(changed, (b, a))):
            begin, end = first.start(2), second.end(2)
            one, other = code.text[begin:first.end(2)], code.text[second.start(2):end]
            yield code.fault("order", begin, end, f"{other} {one}", f"if ({SWITCH}) {{ {other} {one} }} else {{ {one} {other} }}")


def checks_dropped(code):
    for found in re.finditer(r"\bif (?=\()", code.code):
        begin, end = found.end() + 1, code.partner.get(found.end())
        if end is None or not REFUSAL.match(code.code, end + 1):
            continue
        for semicolon in re.finditer(r"; ?", code.code[begin:end]):  # if (declaration; condition)
            if code.around(found.end() + 1 + semicolon.start()) == found.end():
                begin = found.end() + 1 + semicolon.end()
        yield code.fault("check", begin, end, "false", f"!{SWITCH} && ({code.text[begin:end]})")


def places(text):
    """All places of a source, always in the same order."""
    code = Code(text)
    found = [*exchanged(code), *arguments_swapped(code), *statements_swapped(code), *checks_dropped(code)]
    return [fault for fault in found if fault["original"] and not code.is_in_message(fault["begin"])]
