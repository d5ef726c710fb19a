"""What `benchmarks/mutation.py` changes in the product's code, what it leaves alone, and which tests must notice.

Operators are cosmic-ray's: its own generic ones that make sense in formulas, and ours for this domain, built on the
same base class. An operator changes one place of a module at a time.
"""

import ast
import re
from collections.abc import Iterable, Iterator
from typing import Any

import cosmic_ray.plugins
from cosmic_ray.operators.operator import Operator
from cosmic_ray.operators.provider import OperatorProvider
from parso.python.tree import Name
from parso.tree import NodeOrLeaf

# Module -> (fast tests, most telling first; slow tests, of real ranks, for mutants that the fast ones leave alive).
FORMULAS, LOSS, BATCH = "tests/test_maths_formulas.py", "tests/test_maths_loss.py", "tests/test_maths_batch.py"
IMPORTANCE, REWARDS, SCHEDULE = (f"tests/test_maths_{name}.py" for name in ("importance", "rewards", "schedule"))
DISTILLATION = "tests/test_maths_distillation.py"
VOCAB, CONTEXT = "tests/test_maths_vocab_parallel.py", "tests/test_megatron_context_parallel.py"
VOCAB_RANKS = f"{VOCAB}::test_split_vocabulary_equals_whole"
CONTEXT_RANKS = f"{CONTEXT}::test_training_is_that_of_one_process[cp2 dp2]"
ON_RANKS = (VOCAB_RANKS, f"{CONTEXT}::test_training_is", f"{CONTEXT}::test_attention", f"{FORMULAS}::test_whiten_over")
TESTS: dict[str, tuple[list[str], list[str]]] = {
    "slime/utils/kl.py": ([FORMULAS, LOSS], []),
    "slime/utils/policy_loss.py": ([FORMULAS, LOSS], []),
    "slime/utils/advantages.py": ([FORMULAS, LOSS], []),
    "slime/utils/importance.py": ([IMPORTANCE, LOSS], []),
    "slime/utils/masked.py": ([FORMULAS, LOSS], [f"{FORMULAS}::test_whiten_over_ranks_equals_one_process"]),
    "slime/utils/rewards.py": ([REWARDS, BATCH], []),
    "slime/utils/ppo_utils.py": ([FORMULAS, VOCAB], []),
    "slime/utils/vocab_parallel.py": ([VOCAB, LOSS], [VOCAB_RANKS]),
    "slime/utils/vocab_shard.py": ([VOCAB, LOSS], [VOCAB_RANKS]),
    "slime/utils/distillation.py": ([DISTILLATION], []),
    "slime/models/rows.py": (["tests/test_weights_algebra.py"], []),
    "slime/data/schedule.py": ([SCHEDULE, LOSS], []),
    "slime/data/batch.py": ([BATCH], []),
    "slime/backends/megatron_utils/advantages.py": ([LOSS], []),
    "slime/backends/megatron_utils/loss.py": ([LOSS, DISTILLATION, "tests/test_plugins_combine.py"], [CONTEXT_RANKS]),
    "slime/backends/megatron_utils/log_probs.py": ([LOSS, DISTILLATION], [CONTEXT_RANKS]),
    "slime/backends/megatron_utils/cp_utils.py": ([CONTEXT, LOSS], [CONTEXT_RANKS]),
}

# Mutants that behave as the original for every valid input: (module, the changed line, why).
EQUIVALENT: list[tuple[str, str, str]] = [
    ("slime/data/schedule.py", "+ break", "numbers of samples differ by one at most: one empty micro-batch is enough"),
    ("slime/backends/megatron_utils/loss.py", "(ppo_kl >= 0)", "where ppo_kl is 0 the ratio is 1, so not clipped"),
    ("slime/backends/megatron_utils/loss.py", "(advantages <= 0)", "where the advantage is 0 nothing is clipped"),
    ("slime/backends/megatron_utils/log_probs.py", "part.context.size >= 1", "the whole of one part is that part"),
    ("slime/backends/megatron_utils/log_probs.py", "unconcat_tokens[ -1].device", "all are on one device"),
    ("slime/backends/megatron_utils/cp_utils.py", "if first <= last:", "a stretch without tokens adds none"),
    *(
        (
            "slime/backends/megatron_utils/advantages.py",
            line,
            "the KL of masked tokens is dropped again where it is used",
        )
        for line in ("compute_approx_kl((lp)", "(ref), args.kl_loss_type")
    ),
    ("slime/backends/megatron_utils/advantages.py", "zeros_like(m.roll(1)", "only its shape counts"),
    ("slime/data/batch.py", "enumerate([np.roll(x, 1) for x in masks]) if mask.any()", "any() knows no order"),
    ("slime/data/batch.py", "(mass < 1.001)", "the bound is a tolerance"),
    ("slime/utils/policy_loss.py", "drift = masked_mean(old - new, mask)", "a comparison passes no gradient"),
    ("slime/utils/policy_loss.py", "outside = (log_ratio.abs()", "a comparison passes no gradient"),
    ("slime/utils/policy_loss.py", "torch.where(advantages <= 0", "loss and gradient of an advantage of 0 are 0"),
    *(
        ("slime/utils/importance.py", line, "an absolute difference")
        for line in ('"tis_abs": ((1) - (weight)).abs()', "select(((1) - (weight)).abs(), left)")
    ),
    *(
        (
            "slime/utils/importance.py",
            line,
            "each use of the log-ratio drops masked tokens again, and none has a gradient",
        )
        for line in ("select(new.detach(), mask) - (old)", "(new.detach()) - select(old, mask)")
    ),
    ("slime/utils/masked.py", "total((((mean) - (flat)) ** 2).sum()", "a square"),
    ("slime/utils/masked.py", "[x.roll(1) for x in loss_masks][0].device", "the same device"),
    ("slime/utils/masked.py", "len([x.roll(1) for x in loss_masks])", "only their number counts"),
    ("slime/utils/vocab_shard.py", "+ _CPU_BLOCK_BYTES = ", "the number of rows in work at once; costs time only"),
    ("slime/utils/vocab_shard.py", "dist.get_world_size(tp_group) >= 1", "the sum over one rank is its own number"),
    ("slime/utils/vocab_parallel.py", "set_materialize_grads(True)", "gradients of 0 for none; costs time only"),
    *(
        ("slime/utils/vocab_parallel.py", line, "rows are picked where all are meant; costs time only")
        for line in ("== (ctx.kept) - (hidden.size(0))", "== hidden.size(0) + ctx.kept")
    ),
]

CORE = [
    *(f"ReplaceBinaryOperator_{x}" for x in (
        "Add_Sub", "Sub_Add", "Mul_Div", "Div_Mul", "FloorDiv_Mul", "Mod_FloorDiv", "Pow_Mul", "BitAnd_BitOr",
        "BitOr_BitAnd")),
    *(f"ReplaceComparisonOperator_{x}" for x in (
        "Lt_LtE", "LtE_Lt", "Gt_GtE", "GtE_Gt", "Eq_NotEq", "NotEq_Eq", "Is_IsNot", "IsNot_Is")),
    *(f"ReplaceUnaryOperator_Delete_{x}" for x in ("USub", "Not", "Invert")),
    "AddNot", "ReplaceTrueWithFalse", "ReplaceFalseWithTrue", "ReplaceAndWithOr", "ReplaceOrWithAnd",
    "ReplaceContinueWithBreak", "NumberReplacer", "ZeroIterationForLoop",
]  # fmt: skip


class Rewrite(Operator):
    """An operator given by the texts that a node of the syntax tree could become."""

    def rewrites(self, node: NodeOrLeaf) -> Iterable[str]:
        raise NotImplementedError

    def mutation_positions(self, node: NodeOrLeaf) -> Iterator[tuple[tuple[int, int], tuple[int, int]]]:
        for _ in self.rewrites(node):
            yield node.start_pos, node.end_pos

    def mutate(self, node: NodeOrLeaf, index: int) -> NodeOrLeaf:
        return Name(list(self.rewrites(node))[index], node.start_pos, prefix=node.get_first_leaf().prefix)

    @classmethod
    def examples(cls) -> tuple[()]:
        return ()


def code(*nodes: NodeOrLeaf) -> str:
    return "".join(n.get_code() for n in nodes).strip()


def used(node: NodeOrLeaf) -> bool:
    """A name that is read: no definition and no keyword of a call."""
    if node.type != "name" or node.is_definition():
        return False
    return not (node.parent.type == "argument" and node.parent.children[0] is node)


def is_attribute(node: NodeOrLeaf) -> bool:
    before = node.get_previous_leaf()
    return before is not None and before.value == "."


def calls(node: NodeOrLeaf) -> Iterator[tuple[int, str]]:
    """(index of the `.name` trailer, name) of each method call in a chain such as x.detach().sum()."""
    if node.type in ("atom_expr", "power"):
        for i, (dot, call) in enumerate(zip(node.children[1:], node.children[2:], strict=False), start=1):
            if dot.type == call.type == "trailer" and dot.children[0].value == "." and call.children[0].value == "(":
                yield i, dot.children[1].value


class SwapDifference(Rewrite):
    """Flips a sign: a - b becomes b - a."""

    def rewrites(self, node):
        if node.type == "arith_expr" and len(node.children) == 3 and node.children[1].value == "-":
            yield f"({code(node.children[2])}) - ({code(node.children[0])})"


class ShiftMask(Rewrite):
    """A mask moves by one token: each place takes that of the token before it."""

    ONE, MANY = ("mask", "m", "here", "trained", "reached"), ("masks", "loss_masks", "keep")
    UNCHANGED = (".device", ".dtype", ".shape", ".numel", ".size")

    def rewrites(self, node):
        if used(node) and node.value in self.ONE + self.MANY:
            after = node.get_next_leaf()
            if after.value == "." and "." + after.get_next_leaf().value in self.UNCHANGED:
                return
            numpy = "import numpy" in node.get_root_node().get_code()
            one, many = ("np.roll({}, 1)", "x") if numpy else ("{}.roll(1)", "x")
            yield one.format(node.value) if node.value in self.ONE else f"[{one.format(many)} for x in {node.value}]"
        elif node.type == "atom_expr" and code(node) in ('batch["loss_masks"]', 'data["loss_masks"]'):
            yield f"[x.roll(1) for x in {code(node)}]"


class DropMask(Rewrite):
    """select(x, mask) becomes x: what a masked position holds is seen."""

    def rewrites(self, node):
        if node.type == "atom_expr" and code(node.children[0]) == "select" and len(node.children) > 1:
            arguments = node.children[1].children[1]
            if arguments.type == "arglist":
                yield f"({code(arguments.children[0])})" + code(*node.children[2:])


class DropDenominator(Rewrite):
    """a / b becomes a; a mean becomes a sum."""

    def rewrites(self, node):
        if node.type == "term":
            for i, child in enumerate(node.children):
                if child.type == "operator" and child.value == "/":
                    yield code(*node.children[:i], *node.children[i + 2 :])
        if used(node) and node.value in ("mean", "masked_mean"):
            yield node.value.replace("mean", "sum")


class SwapNames(Rewrite):
    """Two bounds, factors or functions of the same kind are confused."""

    EITHER = (
        ("eps_clip", "eps_clip_high"), ("eps_clip_c", "eps_clip"), ("tis_clip", "tis_clip_low"), ("gamma", "lambd"),
        ("max", "min"), ("amax", "amin"), ("maximum", "minimum"), ("any", "all"), ("num_samples", "num_tokens"),
        ("entropy_coef", "kl_loss_coef"), ("kl_coef", "opd_kl_coef"),
    )  # fmt: skip
    LOCAL = (
        ("lower", "upper"), ("low", "high"), ("old", "new"), ("samples", "tokens"), ("first", "last"),
        ("advantages", "returns"), ("rows", "targets"), ("log_z", "entropy"), ("grad_lp", "grad_entropy"),
    )  # fmt: skip

    def rewrites(self, node):
        if not used(node):
            return
        scope = node
        while scope.type not in ("funcdef", "file_input"):
            scope = scope.parent
        for a, b in self.EITHER + (() if is_attribute(node) else self.LOCAL):
            if node.value in (a, b):
                other = b if node.value == a else a
                known = is_attribute(node) or other in ("max", "min", "any", "all")
                if known or re.search(rf"\b{other}\b", scope.get_code()):  # a NameError would be no finding
                    yield other


class DropCall(Rewrite):
    """x.detach() or x.clamp(...) becomes x."""

    def rewrites(self, node):
        for i, name in calls(node):
            if name in ("detach", "clamp"):
                yield code(*node.children[:i], *node.children[i + 2 :])


class ShiftSlice(Rewrite):
    """A bound of a slice moves by one."""

    def rewrites(self, node):
        if node.type == "subscript":
            for i, child in enumerate(node.children):
                if code(child) != ":":
                    yield code(*node.children[:i]) + f"({code(child)}) + 1" + code(*node.children[i + 1 :])


OURS = {c.__name__: c for c in (
    SwapDifference, ShiftMask, DropMask, DropDenominator, SwapNames, DropCall, ShiftSlice)}  # fmt: skip


class Provider:
    """All operators of this benchmark, by name."""

    def __iter__(self) -> Iterator[str]:
        return iter([*CORE, *OURS])

    def __getitem__(self, name: str) -> type[Operator]:
        return OURS[name] if name in OURS else OperatorProvider()[name]


def install() -> None:
    """Makes cosmic-ray use these operators and no others."""
    cosmic_ray.plugins.OPERATOR_PROVIDERS.clear()
    cosmic_ray.plugins.OPERATOR_PROVIDERS["slime"] = Provider()


# -- what is left alone -----------------------------------------------------------------------------------------------

Span = tuple[tuple[int, int], tuple[int, int]]


def noise(source: str) -> list[Span]:
    """Places of a module whose change is no change of its numbers: annotations, decorators, imports, texts of errors
    and logs, assertions, `strict=` of zip, which is an assertion too, and signatures but for their defaults."""
    found: list[ast.AST] = []
    spans: list[Span] = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef):
            at = (node.lineno, node.col_offset)
            for default in filter(None, [*node.args.defaults, *node.args.kw_defaults]):
                spans.append((at, _span(default)[0]))
                at = _span(default)[1]
            spans.append((at, _span(node.body[0])[0]))
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            found += node.decorator_list
        if isinstance(node, ast.AnnAssign):
            found.append(node.annotation)
        if isinstance(node, ast.Import | ast.ImportFrom | ast.Raise | ast.Assert):
            found.append(node)
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
            called = node.value.func
            if isinstance(called, ast.Attribute) and getattr(called.value, "id", "") == "logger":
                found.append(node)
        if isinstance(node, ast.keyword) and node.arg == "strict":
            found.append(node.value)
    return spans + [_span(n) for n in found]


def _span(node: Any) -> Span:
    return (node.lineno, node.col_offset), (node.end_lineno, node.end_col_offset)


def is_noise(start: tuple[int, int], spans: list[Span]) -> bool:
    return any(a <= start < b for a, b in spans)


def reason_if_equivalent(module: str, changed: str) -> str | None:
    """Why a mutant whose changed lines read `changed` is no fault; None when it is one."""
    return next((why for where, line, why in EQUIVALENT if where == module and line in changed), None)
