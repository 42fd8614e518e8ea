"""The structs that Python fills for the C++ code. `library` refuses a library whose structs have other sizes."""

import ctypes
from ctypes import c_double, c_int64, c_void_p


def _all(kind: type, names: str) -> list[tuple[str, type]]:
    return [(name, kind) for name in names.split()]


class Matrix(ctypes.Structure):
    """`Matrix` of step.h, as the three structs after it."""

    _fields_ = [*_all(c_void_p, "weight scale bias"), *_all(c_int64, "kind outputs")]


class Layer(ctypes.Structure):
    _fields_ = [
        *_all(c_void_p, "norm second_norm query_norm key_norm"),
        *_all(Matrix, "query key value out gate up down"),
        *_all(c_void_p, "keys values"),
        ("window", c_int64),
    ]


class Model(ctypes.Structure):
    _fields_ = [
        *_all(c_int64, "layers width heads kv_heads head_width inner capacity cache_kind positions"),
        *_all(c_void_p, "cosines sines"),
        *_all(Matrix, "embedding head"),
        ("norm", c_void_p),
        *_all(c_double, "epsilon scaling"),
    ]


class Call(ctypes.Structure):
    _fields_ = [
        *_all(c_int64, "rows tokens kept threads"),
        *_all(c_void_p, "ids starts cache_rows depths sees logits columns"),
    ]


class Sampling(ctypes.Structure):
    """`Sampling` of rules.h."""

    _fields_ = [*_all(c_double, "temperature top_p min_p"), ("top_k", c_int64)]


class Block(ctypes.Structure):
    """`Block` of block.cpp, which says what each field is; the two may only change together."""

    _fields_ = [
        *_all(c_int64, "rows blocks nanoseconds batch gamma proposer greedy_target greedy_draft threads"),
        *_all(c_int64, "columns vocabulary positions places longest_ngram shortest_ngram steps"),
        *_all(c_void_p, "past past_hashes past_starts"),
        *_all(c_int64, "past_tokens past_ngrams"),
        *_all(c_void_p, "target draft target_layers draft_layers seats tokens lengths read prompt_lengths limits"),
        *_all(
            c_void_p, "ends last_end uniforms given_ids given_counts given_probs accepted drafted ids counts sources"
        ),
        *_all(c_void_p, "log_probs peaks draft_peaks seconds"),
        ("lenience", c_double),
        ("sampling", Sampling),
        ("draft_sampling", Sampling),
    ]


STRUCTS = (Model, Layer, Call, Block)  # in the order of `struct_bytes` in block.cpp
