/* SPDX-License-Identifier: Apache-2.0 */
/*
 * libcedar_kernels: the fused operations of Cedar behind a plain C ABI.
 *
 * int cedar_<op>(const cedar_<op>_args* args, void* stream) runs one operation; stream is a cudaStream_t (NULL for the CPU). It
 * returns a cedar_status; cedar_last_error() has the text of this thread's last failure. No call allocates device memory or
 * synchronises, and all calls are re-entrant. cedar_<op>_workspace(args) is the number of bytes that the caller's workspace must
 * have (its content is undefined before and after the call), or -1 on wrong arguments; a call with a smaller one returns
 * CEDAR_WORKSPACE and does nothing. On a GPU the workspace's first CEDAR_COUNTER_BYTES must be zero when a call starts, and are
 * zero again when it has ended.
 *
 * Every field is 8 bytes: a pointer, an int64 or a double. `size` is sizeof of the struct as the caller knows it. Tensors are
 * dense, row-major, on the args' device. T is the number of rows; a row's result does not depend on the other rows, to the bit.
 * On a GPU it may depend on which class their number is of, and on nothing else: attention up to 64 rows and more; on Hopper,
 * whose own instruction adds in another order, linears up to 16, up to 640 and more, wo_a also up to 64, experts up to 640, the
 * router up to 1,791.
 * "optional" pointers may be NULL. pairs is the number of rotary pairs, the last 2 pairs dimensions of a vector. Pool rows are
 * int64 row numbers; 0 is the null row, which is never written and masks a key. On a CPU a number that names no row, page, slot or
 * block is CEDAR_INVALID; a GPU's are not looked at, so there they must be right.
 * On a GPU a launch may begin while the one before it in its stream ends, once that one lets others begin. Until the one before has
 * ended it writes nothing, and reads only what no launch of this library writes: weights and their scales, norm weights, sinks, the
 * router's biases, and fn, scale and base of the hyper-connections. Whatever else writes those has to have ended first.
 * The formulas are those of the docstrings in backend/cedar/ops.
 */
#ifndef CEDAR_KERNELS_H
#define CEDAR_KERNELS_H

#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#define CEDAR_ABI_VERSION 4
#define CEDAR_COUNTER_BYTES 4096

#if defined(__GNUC__)
#define CEDAR_API __attribute__((visibility("default")))
#else
#define CEDAR_API
#endif

typedef enum {
    CEDAR_OK = 0,
    CEDAR_INVALID = 1,     /* an argument contradicts another or the ABI */
    CEDAR_UNSUPPORTED = 2, /* no body for this device, dimension or format: use the reference */
    CEDAR_FAILED = 3,      /* the device refused the launch */
    CEDAR_WORKSPACE = 4    /* workspace_bytes is less than cedar_<op>_workspace */
} cedar_status;

typedef enum { CEDAR_CPU = 0, CEDAR_CUDA = 1 } cedar_device;

/*
 * Types of activations and weights. The last two are of weights only: E4M3 codes with a UE8M0 scale per tile of 32 x 32 (on a GPU
 * at most 2^7), and the routed experts' E2M1 codes with a UE8M0 scale per 32 inputs of a row, in the order of
 * cedar.ops.fp4_tiles (a GPU's).
 */
typedef enum { CEDAR_F32 = 0, CEDAR_BF16 = 1, CEDAR_FP8_TILES = 2, CEDAR_MXFP4 = 3 } cedar_type;

/* How a pool stores a vector of dim values. */
typedef enum {
    CEDAR_RECORD_F32 = 0,
    CEDAR_RECORD_BF16 = 1,
    CEDAR_RECORD_FP8 = 2,   /* dim E4M3, then dim/32 UE8M0; both of one row side by side */
    CEDAR_RECORD_NVFP4 = 3, /* dim/2 bytes of E2M1 pairs (even element in the low nibble), then dim/16 E4M3 */
    CEDAR_RECORD_MXFP4 = 4  /* blocks of 8 rows: 8 x dim/2 bytes of E2M1 pairs, then 8 x dim/32 UE8M0 */
} cedar_record;

CEDAR_API int64_t cedar_abi_version(void);
CEDAR_API const char* cedar_last_error(void);
/* What the library can run: "cpu: avx512" or "cpu: avx2; cuda: sm_90a sm_100a sm_103a". */
CEDAR_API const char* cedar_build_info(void);

/* 1 if the operation of this name ("mega_mhc") has a body for the device, at least for some dimensions; else 0. */
CEDAR_API int cedar_has_body(const char* op, int64_t device);

/*
 * A sub-layer boundary of the hyper-connections, any part of which may be left out:
 *   output given       new_streams = expand(output, streams, post, comb)
 *   fn given           new_pre, new_post, new_comb = mix(new_streams)
 *   norm_weight given  normed = RMSNorm(collapse(new_streams, pre))
 * Without output, new_streams is streams and not written.
 */
typedef struct {
    uint64_t size;
    int64_t device, threads;
    int64_t type;              /* of output, streams, new_streams, normed */
    int64_t rows, hc, hidden;
    int64_t iterations;        /* Sinkhorn rounds */
    double hc_eps, mix_eps, norm_eps;
    const void* output;        /* optional [T, hidden] */
    const void* streams;       /* [T, hc, hidden] */
    const float* post;         /* [T, hc], with output */
    const float* comb;         /* [T, hc, hc] (source, destination), with output */
    const float* pre;          /* [T, hc], with norm_weight */
    const float* fn;           /* optional [(2 + hc) hc, hc hidden] */
    const float* scale;        /* [(2 + hc) hc] */
    const float* base;         /* [(2 + hc) hc] */
    const float* norm_weight;  /* optional [hidden] */
    void* new_streams;         /* [T, hc, hidden] */
    float* new_pre;            /* [T, hc] */
    float* new_post;           /* [T, hc] */
    float* new_comb;           /* [T, hc, hc] */
    void* normed;              /* [T, hidden] */
    int64_t workspace_bytes;
    void* workspace;
} cedar_mega_mhc_args;

/* The router: ids by falling biased score, weights that sum to scaling. */
typedef struct {
    uint64_t size;
    int64_t device, threads;
    int64_t type;              /* of x */
    int64_t weight_type;
    int64_t rows, hidden, experts, top_k;
    double scaling;
    const void* x;             /* [T, hidden] */
    const void* weight;        /* [experts, hidden] */
    const float* bias;         /* [experts] */
    const float* image_bias;   /* optional [experts], with image */
    const uint8_t* image;      /* optional bool [T]: rows that select with image_bias */
    int64_t* ids;              /* [T, top_k] */
    float* weights;            /* [T, top_k] */
    int64_t workspace_bytes;
    void* workspace;
} cedar_mega_gate_args;

/* Routed experts plus the shared expert; act_quant rounds the inputs of every product to MXFP8. */
typedef struct {
    uint64_t size;
    int64_t device, threads;
    int64_t type;              /* of x, out */
    int64_t weight_type;       /* of w13, w2 */
    int64_t shared_type;       /* of shared_w13, shared_w2; weight_type, unless that is CEDAR_MXFP4 */
    int64_t rows, hidden, inner, experts, top_k;
    int64_t act_quant;
    double limit;              /* of the swiglu */
    const void* x;             /* [T, hidden] */
    const int64_t* ids;        /* [T, top_k] */
    const float* weights;      /* [T, top_k] */
    const void* w13;           /* [experts, 2 inner, hidden]; of CEDAR_MXFP4 rows of w1 and w3 by turns of 8 */
    const uint8_t* w13_scale;  /* with CEDAR_MXFP4 */
    const void* w2;            /* [experts, hidden, inner] */
    const uint8_t* w2_scale;   /* with CEDAR_MXFP4 */
    const void* shared_w13;    /* [2 inner, hidden] */
    const uint8_t* shared_w13_scale; /* with CEDAR_FP8_TILES, as of mxfp8_linear */
    const void* shared_w2;     /* [hidden, inner] */
    const uint8_t* shared_w2_scale;
    void* out;                 /* [T, hidden] */
    int64_t workspace_bytes;
    void* workspace;
} cedar_moe_fp4_args;

/* y = x W^T, then optionally RMSNorm over the outputs. act_quant rounds x to MXFP8 first. */
typedef struct {
    uint64_t size;
    int64_t device, threads;
    int64_t type;              /* of x */
    int64_t weight_type;
    int64_t out_type;          /* of y */
    int64_t rows, in_dim, out_dim;
    int64_t act_quant;
    double norm_eps;
    const void* x;             /* [T, in] */
    const void* weight;        /* [out, in] */
    const uint8_t* weight_scale; /* [ceil(out / 32), ceil(in / 32)], with CEDAR_FP8_TILES */
    const float* norm_weight;  /* optional [out] */
    void* y;                   /* [T, out] */
    int64_t workspace_bytes;
    void* workspace;
} cedar_mxfp8_linear_args;

/* The block-diagonal half of the output projection: group g of x has rows [g rank, (g + 1) rank) of the weight. */
typedef struct {
    uint64_t size;
    int64_t device, threads;
    int64_t type;              /* of x, y */
    int64_t weight_type;
    int64_t rows, groups, in_dim, rank;
    const void* x;             /* [T, groups, in] */
    const void* weight;        /* [groups rank, in] */
    const uint8_t* weight_scale; /* [ceil(groups rank / 32), ceil(in / 32)], with CEDAR_FP8_TILES */
    void* y;                   /* [T, groups rank] */
    int64_t workspace_bytes;
    void* workspace;
} cedar_wo_a_args;

/*
 * Window records of a step's rows, encode(rope(RMSNorm(kv))), and where they go: row t's record is row history_rows + t of table;
 * the rows before are copied from ring rows history first. Then table row history_rows + store_from[i] (store_from NULL: i) goes
 * to ring row store_to[i].
 */
typedef struct {
    uint64_t size;
    int64_t device, threads;
    int64_t type;              /* of kv */
    int64_t record;            /* cedar_record */
    int64_t rows, dim, pairs;
    int64_t history_rows, stores;
    int64_t ring_rows;
    double norm_eps;
    const void* kv;            /* [T, dim] */
    const float* norm_weight;  /* [dim] */
    const float* cos;          /* [T, pairs] */
    const float* sin;
    const int64_t* history;    /* optional [history_rows] ring rows */
    const int64_t* store_from; /* optional [stores] */
    const int64_t* store_to;   /* [stores] ring rows */
    void* ring;                /* [ring_rows] records */
    void* table;               /* [history_rows + T] records */
    int64_t workspace_bytes;
    void* workspace;
} cedar_window_store_args;

/*
 * Compressed KV and index keys of the groups that end in a step. projected: ratio 1, the values; ratio 2, float32 kv | gate.
 * Group g pools rows first[g] of (open rows open_from ++ the step's rows) and group_rows[g] of the step's rows; then projected
 * row open_rows[i] becomes open row open_to[i]. A negative slot or open_to: nothing is stored.
 */
typedef struct {
    uint64_t size;
    int64_t device, threads;
    int64_t type;               /* of the latent, wk and, with ratio 1, projected */
    int64_t record, index_record;
    int64_t ratio, rows, groups, dim, index_dim, pairs;
    int64_t opens, leaves_open; /* lengths of open_from and open_rows */
    int64_t open_slots, kv_rows, index_rows;
    double norm_eps;
    const void* projected;      /* [T, ratio dim] */
    const int64_t* group_rows;  /* optional [groups]; NULL: all rows */
    const int64_t* first;       /* [groups], ratio 2 */
    const int64_t* open_from;   /* [opens] slots */
    const int64_t* open_rows;   /* [leaves_open] rows */
    const int64_t* open_to;     /* [leaves_open] slots */
    float* open;                /* [open_slots, 2 dim], ratio 2 */
    const float* norm_weight;   /* [dim] */
    const void* wk;             /* [index_dim, dim] */
    const float* index_norm_weight; /* [index_dim] */
    const float* cos;           /* [groups, pairs] */
    const float* sin;
    const int64_t* slots;       /* [groups] pool rows, negative: none */
    void* kv_pool;              /* [kv_rows] records */
    void* index_pool;           /* [index_rows] records */
    int64_t workspace_bytes;
    void* workspace;
} cedar_compress_store_args;

/*
 * Index scores and the exact top k. Row t sees entries j < visible[t]; entry j lies in pool row
 * pages[base[t] + j / per_page] * per_page + j % per_page. With candidates, a row scores only the entries of its blocks.
 * index: positions, ascending, then -1; slots: their pool rows, then 0. published: the blocks with the best maximum (the newest
 * always), ascending, then -1.
 * On a GPU keys are MXFP4 and quantise is set; else CEDAR_UNSUPPORTED. There a group of 32 of a key, or of a head's query, counts fully
 * while its scale is at least 2^-16 of the largest of that key, or of that head; a head while its weight times its largest scale, which is
 * to be finite, is at least 2^-28 of the row's largest. Of a head's sum with a key on Hopper what is below 14 bits of its largest part is
 * cut off; it is then rounded to 11 bits, as weights are, and to a multiple of 2^-27 of the product of both largest scales. So a score is
 * commonly within 2^-10 of its heads' sums, and exact where these need no more bits.
 */
typedef struct {
    uint64_t size;
    int64_t device, threads;
    int64_t type;              /* of query, weight */
    int64_t record;            /* of the index keys */
    int64_t rows, heads, dim, pairs;
    int64_t top_k, width;      /* width: columns of index and slots, at least min(top_k, largest visible) */
    int64_t max_visible;       /* at least the largest visible */
    int64_t per_page, block;   /* block: entries of a candidate block */
    int64_t candidate_blocks;  /* columns of candidates */
    int64_t published_blocks;  /* columns of published */
    int64_t key_rows, page_count;
    int64_t quantise;          /* round the rotated query to MXFP4 */
    double weight_scale;
    const void* query;         /* [T, heads, dim], not rotated */
    const void* weight;        /* [T, heads] */
    const float* cos;          /* [T, pairs] */
    const float* sin;
    const void* keys;          /* [key_rows] records */
    const int64_t* pages;      /* [page_count], the block table */
    const int64_t* base;       /* [T] */
    const int64_t* visible;    /* [T] */
    const int64_t* candidates; /* optional [T, candidate_blocks], ascending, then -1 */
    int64_t* index;            /* [T, width] */
    int64_t* slots;            /* [T, width] */
    int64_t* published;        /* optional [T, published_blocks] */
    int64_t workspace_bytes;
    void* workspace;
} cedar_mqa_logits_topk_args;

/* Multi-query attention, key = value, with a sink; RoPE on the query and undone on the output. Masked keys have index 0. */
typedef struct {
    uint64_t size;
    int64_t device, threads;
    int64_t type;              /* of query, out */
    int64_t window_record, entry_record;
    int64_t rows, heads, dim, pairs;
    int64_t window_width, entry_width;
    int64_t window_rows, entry_rows;
    double scale;
    const void* query;         /* [T, heads, dim], not rotated */
    const float* cos;          /* [T, pairs] */
    const float* sin;
    const float* sink;         /* [heads] */
    const void* window;        /* [window_rows] records; on a GPU this and entries at a multiple of 16 bytes */
    const int64_t* window_index; /* [T, window_width] */
    const void* entries;       /* optional [entry_rows] records */
    const int64_t* entry_index;  /* [T, entry_width] */
    void* out;                 /* [T, heads, dim] */
    int64_t workspace_bytes;
    void* workspace;
} cedar_mega_attention_args;

/*
 * Dequantised table rows, concatenated per token; a negative row is zeros. A row's scales are in a tensor of their own, as a
 * checkpoint has them, or behind its codes: what is far away is then found at one place instead of two. width is a multiple of 8.
 */
typedef struct {
    uint64_t size;
    int64_t device, threads;
    int64_t type;              /* of out */
    int64_t rows, columns, dim, table_rows, width;
    const int64_t* ids;        /* [T, columns] */
    const uint8_t* table;      /* [table_rows, width] dim E4M3; without table_scale dim / 32 UE8M0 behind them */
    const uint8_t* table_scale; /* optional [table_rows, dim / 32] UE8M0; width is dim then */
    void* out;                 /* [T, columns dim] */
    int64_t workspace_bytes;
    void* workspace;
} cedar_engram_gather_args;

/* The gated injection of Engram's value into the streams. */
typedef struct {
    uint64_t size;
    int64_t device, threads;
    int64_t type;              /* of streams, keys_value, new_streams */
    int64_t rows, hc, hidden;
    double norm_eps;
    const void* streams;       /* [T, hc, hidden] */
    const void* keys_value;    /* [T, hc + 1, hidden] */
    const float* qk_weight;    /* [hc, hidden] */
    void* new_streams;         /* [T, hc, hidden] */
    int64_t workspace_bytes;
    void* workspace;
} cedar_engram_gate_args;

/*
 * count rows of a table in the host's memory as they are: out [count, width] has the codes and behind them the scales of each, by
 * at most so many threads. table_scale, table_width: of cedar_engram_gather_args; width is at least dim + dim / 32, and what is
 * behind these is left alone. A row that the table does not have is of zeros.
 */
CEDAR_API int cedar_pack_rows(const int64_t* ids, int64_t count, const uint8_t* table, int64_t table_rows, int64_t table_width,
                              const uint8_t* table_scale, int64_t dim, uint8_t* out, int64_t width, int64_t threads);

/* A call of one of the operations below. */
typedef struct {
    int (*function)(const void* args, void* stream);
    const void* args;
} cedar_call;

/* Make count calls in order, up to the first that fails. */
CEDAR_API int cedar_replay(const cedar_call* calls, int64_t count, void* stream);

#define CEDAR_OPS(X) \
    X(mega_mhc)      \
    X(mega_gate)     \
    X(moe_fp4)       \
    X(mxfp8_linear)  \
    X(wo_a)          \
    X(window_store)  \
    X(compress_store) \
    X(mqa_logits_topk) \
    X(mega_attention) \
    X(engram_gather) \
    X(engram_gate)

#define CEDAR_DECLARE(op)                                                 \
    CEDAR_API int cedar_##op(const cedar_##op##_args* args, void* stream); \
    CEDAR_API int64_t cedar_##op##_workspace(const cedar_##op##_args* args);
CEDAR_OPS(CEDAR_DECLARE)
#undef CEDAR_DECLARE

#ifdef __cplusplus
}
#endif

#endif
