"""The teacher's top-k probabilities for the examples of a token store, in shards next to the responses, written by any number of ranks.

    topk-H.arrow    rows, and in the schema the settings of the signal; see `data/shards.py`

A row is identified by its example's key, so a store can grow: existing rows stay, and signals with other settings can share the
folder. Examples without a row, because a writer was killed or a file was deleted, are computed again.
"""

import functools
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from data.files import other_key
from data.shards import DamagedShard, MissingShard, Shards, lists_of
from data.signals.columns import COLUMNS, decode, encode
from data.signals.signal import TopKSignal, joined
from speculative.errors import UserError

FORMAT = 5
_FACTS = {"key": pa.uint64(), "tokens": pa.int32(), "tail_sum": pa.float64(), "tail_max": pa.float64()}
_SCHEMA = pa.schema({**_FACTS, **{name: pa.list_(kind) for name, kind in COLUMNS.items()}})
_PLACE = np.dtype([("file", "<i4"), ("row", "<i4"), ("tail_sum", "<f8"), ("tail_max", "<f8")])

SignalManifest = dict[str, str | float]


@dataclass(frozen=True)
class SignalFacts:
    """Size of a signal. `mean`, `largest`: the tail mass of a token.

    The tail mass bounds the effect of truncation: alpha computed from the store is too low by at most its mean, plus or minus
    the rounding of the codes.
    """

    examples: int
    tokens: int
    bytes_per_token: float
    mean: float
    largest: float


def signal_manifest(
    k: int,
    *,
    temperature: float,
    vocab_rows: int,
    target: str,
    target_dtype: str,
    prompts: bool = False,
) -> SignalManifest:
    """The settings that identify a signal: k, the loss's temperature, target, with prompts or not.

    Raises UserError: more entries than the vocabulary has tokens.
    """
    if k > vocab_rows:
        raise UserError(
            f"signal.k = {k}: the target's vocabulary has {vocab_rows} tokens; set it to at most {vocab_rows}"
        )
    manifest: SignalManifest = {
        "format": FORMAT,
        "k": k,
        "temperature": temperature,
        "vocab_rows": vocab_rows,
        "target": target,
        "target_dtype": target_dtype,
    }
    return manifest | ({"prompt_tokens": True} if prompts else {})


class SignalStore:
    """The teacher's signals for N examples with U distinct keys, in the folder of their token store. Safe to read from threads.

    `lengths_N`, `keys_N`: response tokens and key of each example, once it is open.
    """

    def __init__(self, folder: Path) -> None:
        """Nothing is read or written here."""
        self.folder, self._shards = folder, Shards(folder, "topk")

    def open(
        self,
        manifest: SignalManifest,
        lengths: Sequence[int] | np.ndarray,
        keys: Sequence[int] | np.ndarray | None = None,
        *,
        repair: bool = False,
    ) -> None:
        """Read the index of the existing files. The folder may be empty or missing.

        Args:
            manifest: see `signal_manifest`.
            lengths: response tokens of each example.
            keys: 64 bits that identify each example; by default its number.
            repair: delete damaged files, with a line on stderr, and count their examples as missing, instead of raising an error.
        """
        self.lengths_N = np.asarray(lengths, dtype=np.int64)
        self.keys_N = np.asarray(np.arange(len(self.lengths_N)) if keys is None else keys, dtype=np.uint64)
        self._keys_U, self._place_N = np.unique(self.keys_N, return_inverse=True)
        self._place_U = np.zeros(len(self._keys_U), _PLACE)
        self._place_U["file"] = -1
        self.manifest, self._repair = manifest, repair
        self._k, self._vocab_rows = int(manifest["k"]), int(manifest["vocab_rows"])
        self._settings = {b"signal": json.dumps(manifest, sort_keys=True).encode()}
        self._names: list[str] = []  # all files seen so far, by number
        self._tokens: dict[str, int] = {}  # tokens of each file that is there and has these settings
        self._others: dict[str, bytes] = {}  # settings of the other files
        self._sound = functools.cache(self._verified)  # Each file is verified once.
        self._look()

    @property
    def again(self) -> str:
        """The command that makes the signal."""
        return f"`understudy respond {self.folder.parents[1] / 'config.yaml'} --signal topk`"

    def faults(self) -> list[str]:
        """Possible reasons for missing rows: a signal made with other settings. UserError if its file is damaged."""
        if not self._others:
            return []
        name, settings = next(iter(self._others.items()))
        self._sound(name)
        return [f"the existing signal was {other_key(json.loads(settings), self.manifest)}"]

    def close(self) -> None:
        """Unmap the files. Written rows are already on disk."""
        self._shards.mapped.cache_clear()

    def present(self) -> np.ndarray:
        """Which examples have a row, bool. The rows are not read."""
        self._look()
        return self._place_U["file"][self._place_N] >= 0

    def missing(self) -> list[int]:
        """Numbers of the examples without a row."""
        return np.flatnonzero(~self.present()).tolist()

    def lacking(self, indices: Sequence[int]) -> list[int]:
        """Which of these examples must be computed: those without a row and, with repair, those in a damaged file. Each once."""
        if self._without(indices):
            self._look()  # another rank may have written it
        for number in {self._place(index)["file"] for index in indices} - {-1}:
            if self._repair:
                self._sound(self._names[number])
        return self._without(indices)

    def write(self, signals: Mapping[int, TopKSignal]) -> None:
        """Store rows of examples (CPU tensors) in one file, instead of their earlier rows; UserError if the disk is full."""
        rows = [self._row(index, signal) for index, signal in signals.items()]
        columns = [pa.array([row[name] for row in rows], kind) for name, kind in _FACTS.items()]
        columns += [lists_of([row[name] for row in rows]) for name in COLUMNS]
        table = pa.Table.from_arrays(columns, names=[*_FACTS, *COLUMNS]).replace_schema_metadata(self._settings)
        self._take_in(self._shards.write(table))

    def read(self, indices: Sequence[int]) -> TopKSignal:
        """Rows of these examples, concatenated in this order, on the CPU.

        Raises UserError: an example is missing, or its file is damaged.
        """
        signals = [self._load(index) for index in indices]
        nothing = {name: np.zeros(0, kind.to_pandas_dtype()) for name, kind in COLUMNS.items()}
        return joined(signals or [decode(nothing, 0, self._k, self._vocab_rows)])

    def verify(self, *, rank: int = 0, ranks: int = 1) -> None:
        """Verify every file, each rank its share. A damaged one is a UserError; with repair it is deleted, with a line on stderr."""
        for name in sorted(self._tokens)[rank::ranks]:
            self._sound(name)

    def facts(self) -> SignalFacts:
        """Facts about the examples that have a row."""
        present = self.present()
        rows, tokens = self._place_U[self._place_N[present]], int(self.lengths_N[present].sum())
        size = sum((self.folder / name).stat().st_size for name in self._tokens)
        mean, largest = float(rows["tail_sum"].sum()) / max(tokens, 1), float(rows["tail_max"].max(initial=0.0))
        return SignalFacts(len(rows), tokens, size / max(1, sum(self._tokens.values())), mean, largest)

    def _row(self, index: int, signal: TopKSignal) -> Mapping[str, Any]:
        if len(signal.ids_RK) != self.lengths_N[index]:
            raise ValueError(f"example {index} has {self.lengths_N[index]} tokens, not {len(signal.ids_RK)}")
        tails_R = signal.log_tail_R.double().exp()
        return {
            "key": int(self.keys_N[index]),
            "tokens": len(tails_R),
            "tail_sum": float(tails_R.sum()),
            "tail_max": float(max(tails_R.tolist(), default=0.0)),
            **encode(signal, self._vocab_rows),
        }

    def _look(self) -> None:
        """Index files that appeared since the last call, of any rank, and forget deleted ones."""
        there = self._shards.names()
        for name in there:
            if name not in self._tokens and name not in self._others:
                try:
                    self._take_in(name)
                except DamagedShard as damage:
                    self._damaged(name, damage)
                except MissingShard:  # Another rank found it damaged and deleted it.
                    continue
        for name in self._tokens.keys() - set(there):
            self._forget(name)

    def _take_in(self, name: str) -> None:
        """Record where the rows of a file are."""
        table = self._shards.table(name)
        if table.schema.metadata != self._settings:
            self._others[name] = (table.schema.metadata or {}).get(b"signal", b"{}")
            return
        # The checksum is compared only when rows are read, so until then a damaged file can hold anything.
        if table.schema != _SCHEMA or any(table[figure].null_count for figure in _FACTS):
            raise DamagedShard(self.folder / name, "its columns are not those of a signal")
        keys, facts = (
            table["key"].to_numpy(),
            {figure: table[figure].to_numpy() for figure in ("tail_sum", "tail_max")},
        )
        places = np.searchsorted(self._keys_U, keys)
        wanted = places < len(self._keys_U)
        wanted[wanted] = self._keys_U[places[wanted]] == keys[wanted]
        rows = np.zeros(int(wanted.sum()), _PLACE)
        rows["file"], rows["row"] = len(self._names), np.flatnonzero(wanted)
        for figure, values in facts.items():
            rows[figure] = values[wanted]
        self._names.append(name)
        self._tokens[name] = int(table["tokens"].to_numpy().sum())
        self._place_U[places[wanted]] = rows

    def _forget(self, name: str) -> None:
        number = len(self._names) - 1 - self._names[::-1].index(name)
        del self._tokens[name]
        self._place_U["file"][self._place_U["file"] == number] = -1

    def _place(self, index: int) -> Any:
        return self._place_U[self._place_N[index]]

    def _without(self, indices: Sequence[int]) -> list[int]:
        return [index for index in dict.fromkeys(indices) if self._place(index)["file"] < 0]

    def _load(self, index: int) -> TopKSignal:
        place = self._place(index)
        if place["file"] < 0:
            raise UserError(f"{self.folder}: example {index} has no signal; run {self.again}")
        name, row = self._names[place["file"]], int(place["row"])
        self._sound(name)
        columns = {column: self._shards.values(name, column, row) for column in COLUMNS}
        return decode(columns, int(self.lengths_N[index]), self._k, self._vocab_rows)

    def _verified(self, name: str) -> None:
        try:
            self._shards.verify([name])
        except DamagedShard as damage:
            self._damaged(name, damage)

    def _damaged(self, name: str, damage: DamagedShard) -> None:
        """With repair, delete a damaged file; otherwise raise."""
        if not self._repair:
            raise UserError(f"{damage.fault}; run {self.again} to make its rows again") from damage
        if damage.path.exists():
            print(f"understudy: {damage.fault}; its rows are computed again", file=sys.stderr)
            damage.path.unlink(missing_ok=True)
        if name in self._tokens:
            self._forget(name)
