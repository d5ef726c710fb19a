"""The rooms of the house import only downwards: drivers, ray, rollout and backends, data and models, config."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
# What a room may import of slime's other rooms.
ALLOWED = {
    "config": set(),
    "utils": {"config"},
    "data": {"config", "utils"},
    "models": {"config", "utils"},
    "rollout": {"config", "utils", "data"},
    "observability": {"config", "utils", "data", "rollout"},
    "backends": {"config", "utils", "data", "models"},
    "ray": {"config", "utils", "data", "models", "rollout", "backends", "observability"},
}
# Packages that a room must not import, not even inside functions.
FORBIDDEN = {
    "config": {"torch", "ray", "transformers", "megatron", "sglang", "numpy"},
    "utils": {"ray", "megatron", "sglang"},
    "data": {"ray", "megatron", "sglang", "torch"},
    "rollout": {"megatron", "sglang"},
    "ray": {"megatron", "sglang"},
    "backends": {"ray"},
}


def imports(path: Path) -> set[str]:
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {a.name for a in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and node.level == 0:
            found.add(node.module)
    return found


@pytest.mark.parametrize("room", sorted(ALLOWED))
def test_rooms_import_downwards(room):
    faults = []
    for path in sorted((ROOT / "slime" / room).rglob("*.py")):
        if "stand_ins" in path.parts:
            continue
        for name in imports(path):
            parts = name.split(".")
            if parts[0] == "slime" and len(parts) > 1 and parts[1] not in ALLOWED[room] | {room}:
                faults.append(f"{path.relative_to(ROOT)} imports {name}")
            if parts[0] in FORBIDDEN.get(room, set()):
                faults.append(f"{path.relative_to(ROOT)} imports {name}")
    assert not faults, "\n".join(faults)


def test_every_room_is_listed():
    rooms = {p.name for p in (ROOT / "slime").iterdir() if p.is_dir() and p.name != "__pycache__"}
    assert rooms == set(ALLOWED)
