"""Triton kernels of a decoder layer for few tokens: bound by reading weights and cache once.

Shapes: M tokens of a call (R rows of Q tokens), N outputs and K inputs of a matrix, H query heads, J key/value heads, G = H / J,
D head width, C positions of the cache. Sums are float32. Nothing here depends on the order in which programs run: where several
share a sum, the last to finish adds the parts in their order, so a call gives the same bits each time.
"""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait


@triton.jit
def _begin(OVERLAP: tl.constexpr):
    """With OVERLAP the next kernel starts while this one runs, and waits here for its results (programmatic dependent launch)."""
    if OVERLAP:
        gdc_launch_dependents()
        gdc_wait()


@triton.jit
def _last_of(counter, parts):
    """Whether this program is the last of `parts` to come here; what all have stored is then visible. The counter starts again at 0."""
    tl.debug_barrier()
    last = tl.atomic_add(counter, 1, sem="acq_rel") == parts - 1
    if last:
        tl.store(counter, 0)
    tl.debug_barrier()
    return last


@triton.jit
def _store(
    acc,
    up,
    squares_M,
    y_MN,
    bias_N,
    add_MN,
    n_N,
    m_M,
    M,
    N,
    K,
    eps,
    NORM: tl.constexpr,
    BIAS: tl.constexpr,
    ADD: tl.constexpr,
    GATED: tl.constexpr,
):
    """What follows the sums of a product."""
    kept_N = n_N < N
    here_NM = kept_N[:, None] & (m_M < M)[None, :]
    if NORM:
        scale_M = tl.rsqrt(squares_M / K + eps)
        acc *= scale_M[None, :]
        up *= scale_M[None, :]
    if BIAS:
        acc += tl.load(bias_N + n_N, mask=kept_N, other=0.0)[:, None].to(tl.float32)
        if GATED:
            up += tl.load(bias_N + N + n_N, mask=kept_N, other=0.0)[:, None].to(tl.float32)
    if GATED:
        acc = acc / (1.0 + tl.exp(-acc)) * up
    at = m_M[None, :].to(tl.int64) * N + n_N[:, None]
    if ADD:
        acc += tl.load(add_MN + at, mask=here_NM, other=0.0).to(tl.float32)
    tl.store(y_MN + at, acc.to(y_MN.dtype.element_ty), mask=here_NM)


@triton.jit(do_not_specialize=["M"])
def product(
    x_MK, w_NK, y_MN, norm_K, bias_N, add_MN, partial, counters, M, N, K, eps,
    NORM: tl.constexpr, BIAS: tl.constexpr, ADD: tl.constexpr, GATED: tl.constexpr, SPLIT: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, EVEN: tl.constexpr, PRECISION: tl.constexpr,
    STAGES: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """y = rms_norm(x) @ w.T + bias + add. GATED: w has 2 N rows, and y = silu(first N) * (last N). SPLIT programs share the inputs.
    Normed: the weight multiplies x, and the root mean square, whose squares the loop sums, divides the product.
    """
    tile, part = tl.program_id(0), tl.program_id(1)
    n_N, m_M, k_K = tile * BN + tl.arange(0, BN), tl.arange(0, BM), tl.arange(0, BK)
    kept_N, kept_M = n_N < N, m_M < M
    steps = tl.cdiv(tl.cdiv(K, BK), SPLIT)
    first = part * steps * BK
    w = w_NK + n_N[:, None].to(tl.int64) * K + first + k_K[None, :]
    x = x_MK + m_M[None, :] * K + first + k_K[:, None]
    acc = tl.zeros((BN, BM), tl.float32)
    up = tl.zeros((BN, BM), tl.float32)
    squares_M = tl.zeros((BM,), tl.float32)
    _begin(OVERLAP)
    for step in tl.range(0, steps, num_stages=STAGES):
        inside_K = first + step * BK + k_K < K
        here_NK = kept_N[:, None] if EVEN else kept_N[:, None] & inside_K[None, :]
        here_KM = kept_M[None, :] if EVEN else kept_M[None, :] & inside_K[:, None]
        weights = tl.load(w + step * BK, mask=here_NK, other=0.0, eviction_policy="evict_first")
        values = tl.load(x + step * BK, mask=here_KM, other=0.0)
        if NORM:
            wide = values.to(tl.float32)
            squares_M += tl.sum(wide * wide, 0)
            scale_K = tl.load(norm_K + first + step * BK + k_K, mask=inside_K, other=0.0)
            values = (wide * scale_K[:, None]).to(weights.dtype)
        acc = tl.dot(weights, values, acc, input_precision=PRECISION)
        if GATED:
            more = tl.load(w + N * K + step * BK, mask=here_NK, other=0.0, eviction_policy="evict_first")
            up = tl.dot(more, values, up, input_precision=PRECISION)
    here_NM = kept_N[:, None] & kept_M[None, :]
    last = True
    if SPLIT > 1:
        spot = n_N[:, None] + m_M[None, :] * N
        tl.store(partial + part * M * N + spot, acc, mask=here_NM)
        last = _last_of(counters + tile, SPLIT)
        if last:
            acc = tl.zeros((BN, BM), tl.float32)
            for other in range(SPLIT):
                acc += tl.load(partial + other * M * N + spot, mask=here_NM, other=0.0, cache_modifier=".cg")
    if last:
        _store(
            acc, up, squares_M, y_MN, bias_N, add_MN, n_N, m_M, M, N, K, eps, NORM=NORM, BIAS=BIAS, ADD=ADD, GATED=GATED
        )


@triton.jit(do_not_specialize=["M"])
def product_of_rows(
    x_MK,
    w_NK,
    y_MN,
    norm_K,
    bias_N,
    add_MN,
    M,
    N,
    K,
    eps,
    NORM: tl.constexpr,
    BIAS: tl.constexpr,
    ADD: tl.constexpr,
    GATED: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    STEPS: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """`product` for one or two tokens, without the matrix units: a program reads whole rows of the matrix. The first part of them does not
    depend on the kernel before, and is on its way while that runs.
    """
    n_N, m_M, k_K = tl.program_id(0) * BN + tl.arange(0, BN), tl.arange(0, BM), tl.arange(0, BK)
    kept_N, kept_M = n_N < N, m_M < M
    w = w_NK + n_N[:, None].to(tl.int64) * K + k_K[None, :]
    x = x_MK + m_M[:, None] * K + k_K[None, :]
    acc = tl.zeros((BN, BM), tl.float32)
    up = tl.zeros((BN, BM), tl.float32)
    squares_M = tl.zeros((BM,), tl.float32)
    here_NK = kept_N[:, None] & (k_K < K)[None, :]
    weights = tl.load(w, mask=here_NK, other=0.0, eviction_policy="evict_first")
    more = weights
    if GATED:
        more = tl.load(w + N * K, mask=here_NK, other=0.0, eviction_policy="evict_first")
    _begin(OVERLAP)
    for step in tl.static_range(STEPS):
        inside_K = step * BK + k_K < K
        if step > 0:
            here_NK = kept_N[:, None] & inside_K[None, :]
            weights = tl.load(w + step * BK, mask=here_NK, other=0.0, eviction_policy="evict_first")
            if GATED:
                more = tl.load(w + N * K + step * BK, mask=here_NK, other=0.0, eviction_policy="evict_first")
        values = tl.load(x + step * BK, mask=kept_M[:, None] & inside_K[None, :], other=0.0).to(tl.float32)
        if NORM:
            squares_M += tl.sum(values * values, 1)
            values *= tl.load(norm_K + step * BK + k_K, mask=inside_K, other=0.0).to(tl.float32)[None, :]
        acc += tl.sum(weights.to(tl.float32)[:, None, :] * values[None, :, :], 2)
        if GATED:
            up += tl.sum(more.to(tl.float32)[:, None, :] * values[None, :, :], 2)
    _store(acc, up, squares_M, y_MN, bias_N, add_MN, n_N, m_M, M, N, K, eps, NORM=NORM, BIAS=BIAS, ADD=ADD, GATED=GATED)


@triton.jit
def normed(x_MK, norm_K, y_MK, K, eps, WIDTH: tl.constexpr):
    """rms_norm(x), a token a program."""
    k_K, at = tl.arange(0, WIDTH), tl.program_id(0).to(tl.int64) * K
    x = tl.load(x_MK + at + k_K, mask=k_K < K, other=0.0).to(tl.float32)
    y = x * tl.rsqrt(tl.sum(x * x) / K + eps) * tl.load(norm_K + k_K, mask=k_K < K, other=0.0).to(tl.float32)
    tl.store(y_MK + at + k_K, y.to(y_MK.dtype.element_ty), mask=k_K < K)


@triton.jit
def gate(x_M2N, y_MN, N, WIDTH: tl.constexpr):
    """silu(first N) * (last N)."""
    n_N, at = tl.program_id(1) * WIDTH + tl.arange(0, WIDTH), tl.program_id(0).to(tl.int64) * N
    x = tl.load(x_M2N + 2 * at + n_N, mask=n_N < N, other=0.0).to(tl.float32)
    up = tl.load(x_M2N + 2 * at + N + n_N, mask=n_N < N, other=0.0).to(tl.float32)
    tl.store(y_MN + at + n_N, (x / (1.0 + tl.exp(-x)) * up).to(y_MN.dtype.element_ty), mask=n_N < N)


@triton.jit
def _turned(x, norm_D, angle, eps, here, half, NORM: tl.constexpr, D: tl.constexpr, HALF: tl.constexpr):
    """Both halves of a head, normed and rotated; `angle`: (cosines, sines) of its position."""
    places = tl.arange(0, HALF)
    low = tl.load(x + places, mask=here, other=0.0).to(tl.float32)
    high = tl.load(x + half + places, mask=here, other=0.0).to(tl.float32)
    if NORM:
        scale = tl.rsqrt((tl.sum(low * low) + tl.sum(high * high)) / D + eps)
        low *= scale * tl.load(norm_D + places, mask=here, other=0.0)
        high *= scale * tl.load(norm_D + half + places, mask=here, other=0.0)
    cosines, sines = angle, angle + D
    turned_low = low * tl.load(cosines + places, mask=here, other=0.0) - high * tl.load(
        sines + places, mask=here, other=0.0
    )
    turned_high = high * tl.load(cosines + half + places, mask=here, other=0.0) + low * tl.load(
        sines + half + places, mask=here, other=0.0
    )
    return turned_low, turned_high


@triton.jit(do_not_specialize=["Q", "last_angle"])
def place_heads(
    x_MN,
    query_MHD,
    keys_RJCD,
    values_RJCD,
    positions_M,
    angles_C2D,
    q_norm_D,
    k_norm_D,
    eps,
    last_angle,
    Q,
    C,
    H: tl.constexpr,
    J: tl.constexpr,
    D: tl.constexpr,
    HALF: tl.constexpr,
    NORM: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """Norm and rotate the queries and keys of a token; write keys and values into the cache. One program per head and token."""
    _begin(OVERLAP)
    token, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    half: tl.constexpr = D // 2
    places = tl.arange(0, HALF)
    here = places < half
    x = x_MN + token * ((H + 2 * J) * D) + head * D
    position = tl.load(positions_M + token)
    angle = angles_C2D + tl.minimum(position, last_angle) * (2 * D)
    cached = (token // Q * J) * C * D + position * D
    if head < H:
        low, high = _turned(x, q_norm_D, angle, eps, here, half, NORM, D, HALF)
        to = query_MHD + (token * H + head) * D + places
        tl.store(to, low.to(query_MHD.dtype.element_ty), mask=here)
        tl.store(to + half, high.to(query_MHD.dtype.element_ty), mask=here)
    elif head < H + J:
        low, high = _turned(x, k_norm_D, angle, eps, here, half, NORM, D, HALF)
        to = keys_RJCD + cached + (head - H).to(tl.int64) * C * D + places
        tl.store(to, low.to(keys_RJCD.dtype.element_ty), mask=here)
        tl.store(to + half, high.to(keys_RJCD.dtype.element_ty), mask=here)
    else:
        to = values_RJCD + cached + (head - H - J).to(tl.int64) * C * D + places
        tl.store(to, tl.load(x + places, mask=here, other=0.0), mask=here)
        tl.store(to + half, tl.load(x + half + places, mask=here, other=0.0), mask=here)


@triton.jit(do_not_specialize=["Q", "window"])
def attend(
    query_MHD, keys_RJCD, values_RJCD, positions_M, y_MHD, partial, counters, scale, window, Q, C,
    J: tl.constexpr, G: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, BQ: tl.constexpr, BC: tl.constexpr,
    SPLIT: tl.constexpr, PRECISION: tl.constexpr, STAGES: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """Attention of a row's tokens to its cache: each sees its own position and everything before, within `window` if that is positive.
    The G query heads of a key/value head are read together. SPLIT programs share the positions of a row; they end at its last token.
    """
    _begin(OVERLAP)
    row, head = (tl.program_id(0) // J).to(tl.int64), tl.program_id(0) % J
    part, block = tl.program_id(1), tl.program_id(2)
    q_Q, d_D = block * BQ + tl.arange(0, BQ), tl.arange(0, DP)
    kept_Q, kept_D = q_Q < Q * G, d_D < D
    token_Q = row * Q + q_Q // G
    at_Q = (token_Q * (J * G) + head * G + q_Q % G) * D
    here_QD = kept_Q[:, None] & kept_D[None, :]
    query = tl.load(query_MHD + at_Q[:, None] + d_D[None, :], mask=here_QD, other=0.0)
    position_Q = tl.load(positions_M + token_Q, mask=kept_Q, other=-1).to(tl.int32)
    stop = tl.max(position_Q) + 1
    first = 0
    if window > 0:
        first = tl.maximum(tl.min(tl.where(kept_Q, position_Q, stop)) - window + 1, 0)
    length = tl.cdiv(tl.cdiv(stop - first, SPLIT), BC) * BC
    begin = first + part * length
    end = tl.minimum(begin + length, stop)
    best_Q = tl.full((BQ,), -1e30, tl.float32)
    sum_Q = tl.zeros((BQ,), tl.float32)
    acc = tl.zeros((BQ, DP), tl.float32)
    base = (row * J + head) * C * D
    for start in tl.range(begin, end, BC, num_stages=STAGES):
        c_C = start + tl.arange(0, BC)
        inside_C = c_C < end
        at = base + c_C[:, None].to(tl.int64) * D + d_D[None, :]
        inside_CD = inside_C[:, None] & kept_D[None, :]
        keys = tl.load(keys_RJCD + at, mask=inside_CD, other=0.0)
        scores = tl.dot(query, tl.trans(keys), input_precision=PRECISION) * scale
        seen = inside_C[None, :] & (c_C[None, :] <= position_Q[:, None])
        if window > 0:
            seen = seen & (c_C[None, :] > position_Q[:, None] - window)
        scores = tl.where(seen, scores, -1e30)
        higher_Q = tl.maximum(best_Q, tl.max(scores, 1))
        weights = tl.where(seen, tl.exp(scores - higher_Q[:, None]), 0.0)
        fade_Q = tl.exp(best_Q - higher_Q)
        values = tl.load(values_RJCD + at, mask=inside_CD, other=0.0)
        acc = acc * fade_Q[:, None] + tl.dot(weights.to(values.dtype), values, input_precision=PRECISION)
        sum_Q = sum_Q * fade_Q + tl.sum(weights, 1)
        best_Q = higher_Q
    last = True
    if SPLIT > 1:
        # Of a part: sums, the best score of each query, the sum of its weights.
        group = (tl.program_id(0) * tl.num_programs(2) + block).to(tl.int64)
        size: tl.constexpr = BQ * DP + 2 * BQ
        spot = tl.arange(0, BQ)[:, None] * DP + d_D[None, :]
        line = BQ * DP + tl.arange(0, BQ)
        own = partial + (group * SPLIT + part) * size
        tl.store(own + spot, acc)
        tl.store(own + line, best_Q)
        tl.store(own + line + BQ, sum_Q)
        last = _last_of(counters + group, SPLIT)
        if last:
            best_Q = tl.full((BQ,), -1e30, tl.float32)
            sum_Q = tl.zeros((BQ,), tl.float32)
            acc = tl.zeros((BQ, DP), tl.float32)
            for other in range(SPLIT):
                theirs = partial + (group * SPLIT + other) * size
                their_best_Q = tl.load(theirs + line, cache_modifier=".cg")
                higher_Q = tl.maximum(best_Q, their_best_Q)
                fade_Q, their_fade_Q = tl.exp(best_Q - higher_Q), tl.exp(their_best_Q - higher_Q)
                theirs_acc = tl.load(theirs + spot, cache_modifier=".cg")
                acc = acc * fade_Q[:, None] + theirs_acc * their_fade_Q[:, None]
                sum_Q = sum_Q * fade_Q + tl.load(theirs + line + BQ, cache_modifier=".cg") * their_fade_Q
                best_Q = higher_Q
    if last:
        y = acc / sum_Q[:, None]
        tl.store(y_MHD + at_Q[:, None] + d_D[None, :], y.to(y_MHD.dtype.element_ty), mask=here_QD)
