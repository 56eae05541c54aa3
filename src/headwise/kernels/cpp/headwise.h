/* Attention with statistics on CPUs: the plain C interface of the native kernel.
 *
 * One struct describes a call; the functions read the inputs it points to and write the outputs that
 * are not NULL. Axes are named as everywhere in headwise: B batch, H query heads, G key/value heads,
 * T queries, S keys, D head dimension, Dv width of the values. Strides count elements, not bytes; the
 * last axis of every tensor with strides is dense. Rows without a visible key have output 0, lse and
 * max -inf, and 0 for every other result. Results are bit for bit the same on any number of threads.
 *
 * Masks are ranges, `allowed` and a bias of -inf, never the size of a score: all finite scores are
 * supported, up to the largest float. A row with a score of NaN, or whose largest score overflows to an
 * infinity, gives NaN, as in the plain formula.
 */
#ifndef HEADWISE_H
#define HEADWISE_H

#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

/* Incremented with every change of hw_call, and compared by the caller. */
#define HW_INTERFACE 3

enum { HW_FLOAT32 = 0, HW_BFLOAT16 = 1, HW_FLOAT16 = 2 };

/* Return values of the functions. */
enum {
  HW_OK = 0,
  HW_NO_MEMORY = 1,
  HW_BAD_CALL = 2,
  HW_NO_SUCH_ISA = 3,
  HW_STOPPED = 4, /* the host requested it; results are incomplete */
  /* Done, with one or both of these: */
  HW_NO_NUMBER = 8, /* the sum of some row is not finite, because a score of it is not */
  HW_OVERFLOW = 16  /* some output of another row is not finite, because values are too large or not finite */
};

/* The runtime of the caller. The calling thread leaves it while it computes, and enters it again at the end
   and every 50 ms to check whether to stop. For Python, these are PyEval_SaveThread, PyEval_RestoreThread
   and PyErr_CheckSignals. */
typedef struct {
  void *(*leave)(void);
  void (*enter)(void *left); /* its argument is the result of leave */
  int (*stop)(void);         /* not 0: the call ends early; NULL: never */
} hw_host;

typedef struct {
  int64_t batch, heads, kv_heads, queries, keys, dim, value_dim;
  int64_t dtype;   /* of q, k, v, out and their gradients; everything else is float32 */
  int64_t threads; /* maximum number, at least 1 */
  const hw_host *host; /* or NULL */
  float scale;     /* scores are scale * q.k */
  float softcap;   /* c: scores become c * tanh(score / c), c from 2^-120 to 2^120; 0 for none */

  const void *q, *k, *v;                         /* [B, H, T, D], [B, G, S, D], [B, G, S, Dv] */
  int64_t q_stride[3], k_stride[3], v_stride[3]; /* of batch, head, position */

  /* Positions of the queries among the keys: position[i], or i + offset if it is NULL. */
  int64_t offset;
  const int64_t *position; /* [T] or NULL */

  /* Masks. A pair is allowed if every given mask allows it. */
  int64_t causal;                           /* 1: no key after the query's position */
  int64_t window;                           /* n: only the n keys up to it (needs causal); 0: all */
  const int64_t *low, *high;                /* keys [low, high) of each query, or NULL */
  int64_t low_stride[3], high_stride[3];    /* of batch, head, query; 0 for shared axes */
  const uint8_t *allowed;                   /* booleans at [B, H, T, S], or NULL */
  int64_t allowed_stride[4];
  const float *bias;                        /* added to the scores; -inf: may not attend; or NULL */
  int64_t bias_stride[4];
  const float *slopes;                      /* [H]: adds -slope * |position - j|, or NULL */
  const float *sinks;                       /* [H]: one more logit in each row's sum, or NULL */

  /* Dropout: so many of 65536 weights are dropped in the output, and the others are scaled up to compensate;
     0 to 65535. Statistics and sums use the weights before dropout. See dropout.hpp. */
  int64_t dropped;
  uint64_t seed;

  /* Results of hw_forward. If v is NULL, there is no output, and only the scores are computed. */
  void *out;               /* [B, H, T, Dv] */
  int64_t out_stride[3];
  float *lse;              /* this and the following [B, H, T], dense; or NULL */
  float *max;              /* the largest score that enters the softmax, without sinks */
  float *entropy;          /* nats, of keys and sink together */
  float *ahead;            /* E[j - position] */
  float *first;            /* probability of key 0, */
  float *previous;         /* of the key before the query's position, */
  float *self;             /* and of the key at it */

  /* hw_backward reads out, lse and the statistics above that have a gradient, as written by hw_forward.
     Incoming gradients may be NULL (grad_out too). */
  const void *grad_out;
  int64_t grad_out_stride[3];
  const float *grad_lse, *grad_entropy, *grad_ahead, *grad_first, *grad_previous, *grad_self;
  void *grad_q, *grad_k, *grad_v; /* shapes and dtype of q, k, v; each may be NULL */
  int64_t grad_q_stride[3], grad_k_stride[3], grad_v_stride[3];
  float *grad_sinks;              /* [B, H, T]: each row's share, to be summed; or NULL */

  /* Results of hw_sums, which reads q, k, masks, sinks and lse (with the sink in it). */
  const float *weight;            /* [T]: the weight of each query, or NULL for 1 */
  float *received;                /* [B, H, S]: sum over queries of weight * p, or NULL */
  const int32_t *query_block;     /* [T] and [S], ascending, values in [0, blocks): */
  const int32_t *key_block;
  int64_t blocks;
  float *map;                     /* [B, H, blocks, blocks]: sums of weight * p, or NULL */
} hw_call;

/* Output and statistics; without values, only statistics. */
int hw_forward(const hw_call *call, int isa);

/* Gradients of out, lse, entropy, ahead, first, previous and self in q, k, v and the sinks. */
int hw_backward(const hw_call *call, int isa);

/* Column sums and block maps of P, given the log-sum-exp. */
int hw_sums(const hw_call *call, int isa);

/* The instruction sets that this library was built for, richest first. A negative isa above selects the
   fastest one on this machine, hw_isa_best(). */
int hw_isa_count(void);
const char *hw_isa_name(int isa);
int hw_isa_here(int isa);        /* 1 if this machine supports it */

int hw_isa_best(void);           /* -1 if it supports none */

int hw_interface(void);          /* HW_INTERFACE of the built library */
int64_t hw_call_size(void);      /* sizeof(hw_call), for callers that mirror the struct */

/* Makes the kernel use the threads of an OpenMP runtime of the process, by its GOMP_parallel. NULL: own
   threads. */
void hw_use_team(void *gomp_parallel);

#ifdef __cplusplus
}
#endif
#endif
