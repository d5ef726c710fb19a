"""Does a masked position, an outlier or an odd group reach the loss? Our policy loss and peers' beside it.

    python benchmarks/mask_armour.py            # peers that are installed (pip install trl) get a column
    python benchmarks/mask_armour.py --ours

Each probe changes something that must not matter, and compares loss and gradient with those of the clean batch, bit for
bit where nothing else may differ. Every trainer gets the same per-token log-probs, advantages and masks: our loss
through its public seam for log-probs, TRL's `GRPOTrainer._compute_loss` with the log-probs of its model replaced by the
given ones, its advantages through its own scoring of real generations. Last line: JSON; `failed` counts our failures.
"""

import argparse
import contextlib
import dataclasses
import io
import json
import logging
import math
import sys
import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

NAN, INF = float("nan"), float("inf")
LENGTH = 6


@dataclasses.dataclass
class Batch:
    """Per-token tensors [B, LENGTH] and one advantage per sample. mask 0: not trained (a tool's token, or padding)."""

    new: Tensor
    old: Tensor
    ref: Tensor
    engine: Tensor
    mask: Tensor
    advantages: Tensor

    def rows(self, index: list[int]) -> "Batch":
        return Batch(**{f.name: getattr(self, f.name)[index].clone() for f in dataclasses.fields(self)})

    def masked_out(self, name: str, value: float) -> "Batch":
        """A copy with `value` at every masked position of one input."""
        out = self.rows(list(range(len(self.mask))))
        setattr(out, name, torch.where(self.mask > 0, getattr(out, name), value))
        return out


def clean_batch() -> Batch:
    g = torch.Generator().manual_seed(0)
    mask = torch.ones(4, LENGTH)
    mask[0, 2:4] = 0.0  # a tool's tokens in the middle
    mask[1, 5:] = mask[2, 3:] = 0.0  # shorter responses
    tokens = [-2.0 + 0.3 * torch.randn(4, LENGTH, generator=g) for _ in range(4)]
    return Batch(*tokens, mask=mask, advantages=torch.tensor([1.0, -1.0, 0.5, -0.5]))


Result = tuple[Tensor, Tensor]  # loss, gradient of the new log-probs [B, LENGTH]


class Ours:
    """slime's policy loss with KL loss and truncated importance weights."""

    name = "slime"
    inputs = ("new", "old", "ref", "engine")

    def __init__(self) -> None:
        from slime.config import Args

        self.args = Args(use_kl_loss=True, kl_loss_coef=0.04, kl_loss_type="k3", use_tis=True)

    def loss(self, b: Batch, step: Batch | None = None, empty: bool = False) -> Result:
        """step: the whole optimizer step that `b` is a micro-batch of. empty: add a sample without any response."""
        from slime.backends.megatron_utils.loss import loss_function
        from slime.data.schedule import RankStep

        new = b.new.clone().requires_grad_()
        lengths = [LENGTH] * len(b.mask) + ([0] if empty else [])

        class Given:
            def log_probs_and_entropy(self, rows: Tensor, targets: Tensor, with_entropy: bool) -> Any:
                return new.reshape(-1), torch.zeros_like(new).reshape(-1)

        def column(x: Tensor) -> list[Tensor]:
            return [*x, *([x.new_zeros(0)] if empty else [])]

        whole = b if step is None else step
        batch = {
            "unconcat_tokens": [torch.zeros(n + 1, dtype=torch.long) for n in lengths],
            "total_lengths": [n + 1 for n in lengths],
            "response_lengths": lengths,
            "loss_masks": column(b.mask),
            "log_probs": column(b.old),
            "ref_log_probs": column(b.ref),
            "rollout_log_probs": column(b.engine),
            "advantages": column(b.advantages[:, None].expand(-1, LENGTH)),
        }
        trained = RankStep([], int((whole.mask.sum(1) > 0).sum()), int(whole.mask.sum()))
        loss, _ = loss_function(self.args, batch, trained, Given())
        (grad,) = torch.autograd.grad(loss, new)
        return loss.detach(), grad

    def advantages(self, rewards: list[float]) -> list[float]:
        """Of one group."""
        from slime.data.batch import samples_to_columns
        from slime.utils.types import Sample

        samples = [
            Sample(
                index=i,
                group_index=0,
                rollout_id=i,
                tokens=[1, 2],
                response_length=1,
                reward=r,
                rollout_log_probs=[-1.0],
            )
            for i, r in enumerate(rewards)
        ]
        return samples_to_columns(self.args, samples)["rewards"]


class TRL:
    """TRL's GRPOTrainer, loss_type grpo, with its KL term; the engine's weights belong to its vLLM mode only."""

    inputs = ("new", "old", "ref")

    def __init__(self, folder: str) -> None:
        import trl
        from datasets import Dataset

        from tools.make_tiny_model import TinyModel, make_tiny_model

        self.name = f"TRL {trl.__version__}"
        make_tiny_model(Path(folder) / "model", TinyModel(num_layers=1, hidden_size=32, intermediate_size=48))
        self.rewards: list[float] = []
        self.trainer = self._trainer(trl, folder, Dataset, 4)
        self._make = lambda n: self._trainer(trl, folder, Dataset, n)
        self.loss_method = type(self.trainer)._compute_loss

    def _trainer(self, trl: Any, folder: str, dataset: Any, n: int) -> Any:
        config = trl.GRPOConfig(
            output_dir=f"{folder}/out", use_cpu=True, bf16=False, report_to=[], loss_type="grpo", beta=0.04,
            per_device_train_batch_size=n, num_generations=n, max_completion_length=LENGTH, epsilon_high=0.28,
        )  # fmt: skip
        return trl.GRPOTrainer(
            model=f"{folder}/model",
            reward_funcs=lambda prompts, **_: list(self.rewards),
            args=config,
            train_dataset=dataset.from_dict({"prompt": ["1+1="] * n}),
        )

    def loss(self, b: Batch, step: Batch | None = None, empty: bool = False) -> Result:
        new = b.new.clone().requires_grad_()
        if empty:  # its batches are rectangular: an empty response is a row of padding
            b = Batch(
                *(torch.cat([getattr(b, n), getattr(b, n)[:1]]) for n in ("new", "old", "ref", "engine")),
                mask=torch.cat([b.mask, torch.zeros(1, LENGTH)]),
                advantages=torch.cat([b.advantages, torch.ones(1)]),
            )
        given = torch.cat([new, b.new[len(new) :]]) if empty else new
        trainer = self.trainer
        trainer._get_per_token_logps_and_entropies = lambda *_, **__: (given, torch.zeros_like(given), None)
        trainer.current_gradient_accumulation_steps = 1 if step is None else 2
        trainer.model.train()
        ids = torch.ones(len(b.mask), LENGTH, dtype=torch.long)
        inputs = {
            "prompt_ids": ids[:, :1], "prompt_mask": ids[:, :1], "completion_ids": ids, "completion_mask": b.mask,
            "advantages": b.advantages, "old_per_token_logps": b.old, "ref_per_token_logps": b.ref,
            "num_items_in_batch": b.mask.sum(),
        }  # fmt: skip
        loss = trainer._compute_loss(trainer.model, inputs)
        (grad,) = torch.autograd.grad(loss, new)
        return loss.detach(), grad

    def advantages(self, rewards: list[float]) -> list[float]:
        self.rewards = rewards
        trainer = self._make(len(rewards))
        out = trainer._generate_and_score_completions([{"prompt": "1+1="}] * len(rewards))
        return out["advantages"].tolist()


# -- probes: (trainer) -> "" when passed, else what went wrong; None when the trainer has no such input ---------------


def same(a: Result, b: Result, tolerance: float = 0.0) -> str:
    if not a[0].isfinite() or not a[1].isfinite().all():
        return f"loss {a[0].item():g}, gradient {'finite' if a[1].isfinite().all() else 'not finite'}"
    if tolerance == 0.0:
        equal = torch.equal(a[0], b[0]) and torch.equal(a[1], b[1])
    else:
        equal = torch.allclose(a[0], b[0], rtol=tolerance) and torch.allclose(a[1], b[1], rtol=tolerance, atol=1e-8)
    return "" if equal else f"loss {b[0].item():.6f} became {a[0].item():.6f}"


def garbage(name: str, value: float) -> Callable[[Any], str | None]:
    def probe(trainer: Any) -> str | None:
        if name not in trainer.inputs:
            return None
        clean = clean_batch()
        return same(trainer.loss(clean.masked_out(name, value)), trainer.loss(clean))

    return probe


def outlier(trainer: Any) -> str:
    b = clean_batch()
    b.new[1, 0], b.old[1, 0] = -1.0, -201.0  # negative advantage: the clip does not bound it
    loss, grad = trainer.loss(b)
    return "" if loss.isfinite() and grad.isfinite().all() else f"loss {loss.item():g}"


def outlier_of_reference(trainer: Any) -> str:
    b = clean_batch()
    b.ref[2, 0] = b.new[2, 0] + 200.0
    loss, grad = trainer.loss(b)
    return "" if loss.isfinite() and grad.isfinite().all() else f"loss {loss.item():g}"


def masked_sample(trainer: Any) -> str:
    """Its presence must not change the mean over the others."""
    b = clean_batch()
    b.mask[3] = 0.0
    loss, grad = trainer.loss(b)
    other, other_grad = trainer.loss(b.rows([0, 1, 2]))
    return same((loss, grad[:3]), (other, other_grad), 1e-6)


def empty_response(trainer: Any) -> str:
    return same(trainer.loss(clean_batch(), empty=True), trainer.loss(clean_batch()), 1e-6)


def nothing_trained(trainer: Any) -> str:
    b = clean_batch()
    b.mask[:] = 0.0
    loss, grad = trainer.loss(b)
    return "" if loss == 0.0 and not grad.any() else f"loss {loss.item():g}"


def micro_batches(trainer: Any) -> str:
    """Two micro-batches of unequal samples, added up, are the whole batch."""
    whole = clean_batch()
    whole.mask[3] = 0.0
    parts = [trainer.loss(whole.rows(rows), step=whole) for rows in ([0, 1], [2, 3])]
    total = sum(p[0] for p in parts), torch.cat([p[1] for p in parts])
    return same(total, trainer.loss(whole), 1e-6)  # type: ignore[arg-type]


def group(rewards: list[float], want: list[float], tolerance: float = 0.0) -> Callable[[Any], str | None]:
    def probe(trainer: Any) -> str | None:
        if len(rewards) == 1 and trainer.name.startswith("TRL"):
            return None  # refuses groups of one
        got = trainer.advantages(rewards)
        return "" if all(abs(a - b) <= tolerance for a, b in zip(got, want, strict=True)) else f"{got[0]:.6g}"

    return probe


HALF = math.sqrt(3) / 2  # of rewards 1, 0, 0, 1 with the sample standard deviation
PROBES: dict[str, Callable[[Any], str | None]] = {
    **{
        f"{value} in masked {label}": garbage(name, value)
        for name, label in (
            ("new", "log-probs"), ("old", "old log-probs"), ("ref", "reference"), ("engine", "engine log-probs")
        )
        for value in (NAN, INF, -INF, 300.0, -300.0)
    },
    "log-ratio of 200": outlier,
    "reference 200 away": outlier_of_reference,
    "fully masked sample": masked_sample,
    "empty response": empty_response,
    "nothing trained": nothing_trained,
    "micro-batches add up": micro_batches,
    "8 rewards of 0.95": group([0.95] * 8, [0.0] * 8),
    "8 rewards of 100.3": group([100.3] * 8, [0.0] * 8),
    "group of one": group([0.7], [0.0]),
    "rewards 10000 + {1,0,0,1}": group([10001.0, 10000.0, 10000.0, 10001.0], [HALF, -HALF, -HALF, HALF], 1e-3),
    "NaN reward beside 1,0,0,1": group([1.0, 0.0, 0.0, 1.0, NAN], [HALF, -HALF, -HALF, HALF, 0.0], 1e-3),
}  # fmt: skip


def run(trainer: Any) -> dict[str, str | None]:
    out: dict[str, str | None] = {}
    for name, probe in PROBES.items():
        try:
            with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
                warnings.simplefilter("ignore")
                out[name] = probe(trainer)
        except Exception as error:  # a probe that raises is a probe that failed; the others still run
            out[name] = f"{type(error).__name__}: {error}".split("\n")[0][:60]
    return out


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ours", action="store_true", help="no peers")
    parser.add_argument("--peer-path", action="append", default=[], help="folder with a peer's packages")
    options = parser.parse_args()
    sys.path += options.peer_path
    logging.disable(logging.WARNING)
    results: dict[str, dict[str, str | None]] = {Ours.name: run(Ours())}
    with tempfile.TemporaryDirectory() as folder:
        if not options.ours:
            try:
                with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
                    peer = TRL(folder)
                    results[peer.name] = run(peer)
            except ImportError as error:
                print(f"TRL is not installed ({error}): only our row", file=sys.stderr)
    names = list(results)
    print("| probe | " + " | ".join(names) + " |")
    print("|---|" + "---|" * len(names))
    for probe in PROBES:
        cells = [
            {"": "pass", None: "no such input"}.get(results[n][probe], f"FAIL: {results[n][probe]}") for n in names
        ]
        print(f"| {probe} | " + " | ".join(cells) + " |")
    failed = {n: sum(bool(v) for v in r.values()) for n, r in results.items()}
    print(json.dumps({"probes": len(PROBES), "failed": failed[Ours.name], "failed_by_trainer": failed}))
    return 1 if failed[Ours.name] else 0


if __name__ == "__main__":
    raise SystemExit(main())
