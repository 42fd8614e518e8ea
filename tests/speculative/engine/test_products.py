"""Products of the CPU code, by each compiler and for each vector width: a token's bits do not depend on the tokens beside it."""

import ctypes
import platform
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest

from speculative.engine.compiled import library
from speculative.engine.compiled.model import address_of

CODE = """
#include "product.h"
extern "C" void product_of(const float *x, long tokens, const void *w, long kind, const float *bias, long depth, long outputs, long threads,
                           float *y) {
    Matrix matrix{w, nullptr, bias, kind, outputs};
    for (long thread = 0; thread < threads; thread++)
        products({{matrix, Share(outputs, OUTPUTS, thread, threads), y}}, x, tokens, depth);
}
extern "C" void sums_of_rows(const float *weights, long queries, long positions, const float *values, long width, float *y) {
    weighted_sums(weights, positions, queries, positions, values, width, y);
}
"""
X86 = platform.machine() == "x86_64"
WITHOUT_512, WITHOUT_AVX = ["-mno-avx512f"], ["-mno-avx512f", "-mno-avx2", "-mno-avx", "-mno-fma"]
BUILDS = {
    "g++": ("g++", []),
    "g++ without AVX-512": ("g++", WITHOUT_512),
    "g++ without AVX": ("g++", WITHOUT_AVX),
    "clang++": ("clang++", WITHOUT_512 if X86 else []),  # half as long to compile
}


@pytest.fixture(scope="module", params=BUILDS)
def compiled(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    compiler, flags = BUILDS[request.param]
    if shutil.which(compiler) is None or (flags and not X86):
        pytest.skip(f"no {request.param} here")
    folder = tmp_path_factory.mktemp("products")
    (folder / "code.cpp").write_text(CODE)
    path, here = folder / "code.so", Path(library.__file__).parent
    command = [compiler, *library.FLAGS, *flags, f"-I{here}", str(folder / "code.cpp"), "-o", str(path)]
    subprocess.run(command, check=True, capture_output=True, timeout=library.BUILD_SECONDS)
    loaded = ctypes.CDLL(str(path))
    pointer, number = ctypes.c_void_p, ctypes.c_long
    loaded.product_of.argtypes = [pointer, number, pointer, number, pointer, number, number, number, pointer]
    loaded.sums_of_rows.argtypes = [pointer, number, number, pointer, number, pointer]
    return loaded


def weights(kind: str, outputs: int, depth: int, rng: np.random.Generator) -> tuple[int, np.ndarray, np.ndarray]:
    """The kind's number, the weights as they are stored, and as float32."""
    stored = rng.standard_normal((outputs, depth), dtype=np.float32)
    if kind == "float32":
        return 0, stored, stored
    if kind == "bfloat16":
        cut = stored.view(np.uint32) >> 16
        return 1, cut.astype(np.uint16), (cut << 16).view(np.float32)
    stored = rng.integers(-9, 10, (outputs, depth), dtype=np.int8)
    return 2, stored, stored.astype(np.float32)


@pytest.mark.parametrize("kind", ["float32", "bfloat16", "int8"])
@pytest.mark.parametrize("depth", [5, 24, 90, 1000])  # some fill no vector, or not the last one
@pytest.mark.parametrize("outputs", [7, 90])
def test_a_products_bits_do_not_depend_on_the_tokens_beside_it(
    compiled: ctypes.CDLL, kind: str, depth: int, outputs: int
) -> None:
    rng = np.random.default_rng(depth)
    x, bias = rng.standard_normal((300, depth), dtype=np.float32), rng.standard_normal(outputs, dtype=np.float32)
    number, stored, w = weights(kind, outputs, depth, rng)

    def product(first: int, last: int, threads: int) -> np.ndarray:
        y = np.full(
            (last - first + 1, outputs), np.nan, dtype=np.float32
        )  # nothing may be written behind the last token
        arguments = address_of(stored), number, address_of(bias), depth, outputs, threads, address_of(y)
        compiled.product_of(address_of(x[first:]), last - first, *arguments)
        assert np.isnan(y[-1]).all()
        return y[:-1]

    alone = np.concatenate([product(i, i + 1, 1) for i in range(len(x))])
    np.testing.assert_allclose(alone, x @ w.T + bias, rtol=1e-4, atol=1e-3)  # both add up in their own order
    for tokens in (*range(2, 34), 47, 48, 49, 64, 69, 300):
        together = product(0, tokens, 1 + tokens % 3)
        assert np.array_equal(together, alone[:tokens]), tokens


@pytest.mark.parametrize("width", [6, 24, 40, 64, 72, 96])  # of a head
def test_weighted_sums_do_not_depend_on_the_queries_beside_them(compiled: ctypes.CDLL, width: int) -> None:
    rng = np.random.default_rng(width)
    weights, values = rng.random((12, 77), dtype=np.float32), rng.standard_normal((77, width), dtype=np.float32)

    def sums(first: int, last: int) -> np.ndarray:
        y = np.full((last - first, width), np.nan, dtype=np.float32)
        compiled.sums_of_rows(address_of(weights[first:]), last - first, 77, address_of(values), width, address_of(y))
        return y

    alone = np.concatenate([sums(i, i + 1) for i in range(12)])
    np.testing.assert_allclose(alone, weights @ values, rtol=1e-4, atol=1e-4)
    for queries in range(2, 13):
        assert np.array_equal(sums(0, queries), alone[:queries]), queries
