"""Products of the CPU code for every vector width that this processor has: a token's bits do not depend on the tokens beside it."""

import ctypes
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from speculative.engine.compiled import library
from speculative.engine.compiled.model import address_of

CODE = """
#include "step.cpp"
extern "C" void product_of(const float *x, long tokens, const float *w, long depth, long outputs, float *y) {
    Matrix matrix{w, nullptr, nullptr, FLOAT32, outputs};
    products({{matrix, Share(outputs, OUTPUTS, 0, 1), y}}, x, tokens, depth);
}
extern "C" void sums_of_rows(const float *x, long tokens, const float *w, long depth, long outputs, float *y) {
    weighted_sums(x, depth, tokens, depth, w, outputs, y);
}
"""
# Flags after -march=native: with AVX-512 (if there), without, without AVX.
WIDTHS = {"native": [], "AVX2": ["-mno-avx512f"], "none": ["-mno-avx512f", "-mno-avx2", "-mno-avx", "-mno-fma"]}


@pytest.fixture(scope="module", params=WIDTHS)
def compiled(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    folder = tmp_path_factory.mktemp("products")
    (folder / "code.cpp").write_text(CODE)
    path, here = folder / "code.so", Path(library.__file__).parent
    command = [*library._compiler(), *library.FLAGS, *WIDTHS[request.param], f"-I{here}", str(folder / "code.cpp")]
    subprocess.run([*command, "-o", str(path)], check=True, capture_output=True, timeout=library.BUILD_SECONDS)
    return ctypes.CDLL(str(path))


def run(function: Any, x: np.ndarray, w: np.ndarray, outputs: int) -> np.ndarray:
    y = np.full((len(x), outputs), np.nan, dtype=np.float32)
    depth = ctypes.c_long(x.shape[1])
    x, w = np.ascontiguousarray(x), np.ascontiguousarray(w)
    pointer = ctypes.c_void_p
    function(
        pointer(address_of(x)), ctypes.c_long(len(x)), pointer(address_of(w)), depth, ctypes.c_long(outputs),
        pointer(address_of(y)),
    )  # fmt: skip
    return y


@pytest.mark.parametrize("depth", [5, 16, 24, 40, 90, 1000])  # some fill no vector, or not the last one
@pytest.mark.parametrize("outputs", [4, 7, 90])
def test_a_products_bits_do_not_depend_on_the_tokens_beside_it(compiled: ctypes.CDLL, depth: int, outputs: int) -> None:
    rng = np.random.default_rng(depth)
    x = rng.standard_normal((300, depth), dtype=np.float32)
    w = rng.standard_normal((outputs, depth), dtype=np.float32)
    alone = np.concatenate([run(compiled.product_of, x[i : i + 1], w, outputs) for i in range(len(x))])
    np.testing.assert_allclose(alone, x @ w.T, rtol=1e-4, atol=1e-4)  # both add up in their own order
    for tokens in (*range(2, 70), 300):
        together = run(compiled.product_of, x[:tokens], w, outputs)
        assert np.array_equal(together, alone[:tokens]), tokens


@pytest.mark.parametrize("width", [6, 24, 40, 64, 72, 96])  # of a head
def test_weighted_sums_do_not_depend_on_the_queries_beside_them(compiled: ctypes.CDLL, width: int) -> None:
    rng = np.random.default_rng(width)
    weights = rng.random((12, 77), dtype=np.float32)
    values = rng.standard_normal((77, width), dtype=np.float32)
    alone = np.concatenate([run(compiled.sums_of_rows, weights[i : i + 1], values, width) for i in range(12)])
    np.testing.assert_allclose(alone, weights @ values, rtol=1e-4, atol=1e-4)
    for queries in range(2, 13):
        assert np.array_equal(run(compiled.sums_of_rows, weights[:queries], values, width), alone[:queries]), queries
