"""The 64-bit digest that SGLang's CUDA engines report per parameter, in plain torch, on whatever device the bytes are.

The contract (sglang/kernels, `gpu_tensor_hash`, SGLang 0.5.23): bytes as little-endian 32-bit words, zero-padded; each
word is mixed with its position by murmur3's 32-bit finaliser, twice with different seeds; sums per tile of 8192 words,
finalised and joined to 64 bits; tiles summed modulo 2**64; splitmix64 at the end.
"""

import torch

TILE_WORDS = 8192
_CHUNK_TILES = 512  # 4 Mi words at a time: bounds the scratch memory to about 200 MiB
_SEED = 0x243F6A88
_SEEDS = (_SEED, ((_SEED * 0x9E3779B1) ^ 0xDEADBEEF) & 0xFFFFFFFF)
_POSITION = ((0x27D4EB2D, 15), (0x165667B1, 13))  # factor, rotation
_M32 = 0xFFFFFFFF
_M64 = (1 << 64) - 1


def _mix32(x: torch.Tensor) -> torch.Tensor:
    """murmur3's fmix32 on int64 values below 2**32. Products may wrap past 2**63: the low 32 bits stay right."""
    x = x ^ (x >> 16)
    x = (x * 0x85EBCA6B) & _M32
    x = x ^ (x >> 13)
    x = (x * 0xC2B2AE35) & _M32
    return x ^ (x >> 16)


class TileHasher:
    """Digest of `nbytes` bytes that come in pieces, in any order; keeps 16 bytes for 32 KiB of them. Not cryptographic:
    it finds accidents, not attacks."""

    def __init__(self, nbytes: int, device: torch.device):
        self._nbytes = nbytes
        tiles = -(-nbytes // (4 * TILE_WORDS))
        self._sums = [torch.zeros(tiles, dtype=torch.int64, device=device) for _ in _SEEDS]

    def update(self, start: int, data: torch.Tensor) -> None:
        """The bytes from `start` on: flat uint8, whole words of four but for the end. Raises ValueError otherwise."""
        if data.dtype != torch.uint8 or data.dim() != 1:
            raise ValueError("tile_hash takes flat uint8 tensors: tensor.reshape(-1).view(torch.uint8)")
        if start % 4 or (data.numel() % 4 and start + data.numel() != self._nbytes):
            raise ValueError(f"tile_hash takes words of four bytes: {data.numel()} bytes from {start}")
        pad = -data.numel() % 4
        if pad or data.storage_offset() % 4:
            data = torch.nn.functional.pad(data, (0, pad))
        words = data.view(torch.int32)
        for at in range(0, words.numel(), TILE_WORDS * _CHUNK_TILES):
            self._add(words[at : at + TILE_WORDS * _CHUNK_TILES], start // 4 + at)

    def _add(self, words: torch.Tensor, start: int) -> None:
        value = words.to(torch.int64) & _M32
        position = torch.arange(start, start + words.numel(), device=words.device, dtype=torch.int64)
        first, before = divmod(start, TILE_WORDS)
        after = -(before + words.numel()) % TILE_WORDS
        for sums, seed, (factor, rotation) in zip(self._sums, _SEEDS, _POSITION, strict=True):
            rotated = ((position << rotation) | (position >> (32 - rotation))) & _M32
            mixed = _mix32(value ^ ((position * factor + seed) & _M32) ^ rotated)
            tiles = torch.nn.functional.pad(mixed, (before, after)).view(-1, TILE_WORDS).sum(1)
            sums[first : first + len(tiles)] += tiles

    def digest(self) -> int:
        if not self._nbytes:
            return 0
        padded = self._nbytes + -self._nbytes % 4
        halves = [_mix32((sums & _M32) ^ (padded & _M32)) for sums in self._sums]
        high, low = (int(half.sum().item()) for half in halves)  # below 2**32 per tile: no overflow in int64
        total = ((high << 32) + low) & _M64
        total ^= total >> 30
        total = total * 0xBF58476D1CE4E5B9 & _M64
        total ^= total >> 27
        total = total * 0x94D049BB133111EB & _M64
        return total ^ total >> 31


def tile_hash(data: torch.Tensor) -> int:
    """Digest of a flat uint8 tensor."""
    hasher = TileHasher(data.numel(), data.device)
    hasher.update(0, data)
    return hasher.digest()
