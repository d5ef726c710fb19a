"""What one can ask of a run folder, and of a model.

  python -m slime view RUN        samples of a step, best and worst first
  python -m slime explain RUN     is every prompt accounted for; --sample ID: what became of one sample
  python -m slime summary RUN     one JSON line: first and last reward, steps, seconds, gap, sync
  python -m slime plot RUN        draw reward.png again

  python -m slime compare-specs --hf-checkpoint FOLDER    our layers with Transformer Engine's or transformers'

Training is `python train.py` (--help lists its flags, --dry-run prints its plan).
"""

import importlib
import sys
from collections.abc import Sequence

COMMANDS = {
    "view": "observability.view",
    "explain": "observability.explain",
    "summary": "observability.summary",
    "plot": "observability.plots",
    "compare-specs": "backends.megatron_utils.compare_specs",
}


def main(argv: Sequence[str]) -> int:
    if not argv or argv[0] in ("-h", "--help", "help"):
        print((__doc__ or "").strip())
        return 0 if argv else 2
    name, *rest = argv
    if name not in COMMANDS:
        print(f"slime: error: unknown command {name!r}: it is one of {', '.join(COMMANDS)}", file=sys.stderr)
        return 2
    return importlib.import_module(f"slime.{COMMANDS[name]}").main(rest)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
