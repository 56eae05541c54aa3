/* Attention with statistics on CPUs: the plain C interface of the native kernel.
 *
 * One struct describes a call; the functions read the inputs it points to and write the outputs that
 * are not NULL. Axes are named as everywhere in headwise: B batch, H query heads, G key/value heads,
 * T queries, S keys, D head dimension, Dv width of the values. Strides count elements, not bytes; the
 * last axis of every tensor with strides is dense. Rows that may attend to nothing give output 0,
 * lse and max -inf, and 0 for all else. Every result is the same bit for bit on any number of threads.
 *
 * Who may attend is said by ranges, `allowed` and a bias of -inf, never by the size of a score: all finite
 * scores are served, up to the largest float. A row with a score of NaN, or whose largest one overflowed to an
 * infinity, comes out as NaN, as in the plain formula.
 */
#ifndef HEADWISE_H
#define HEADWISE_H

#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

/* Raised with every change of hw_call, and compared by the caller. */
#define HW_INTERFACE 3

enum { HW_FLOAT32 = 0, HW_BFLOAT16 = 1, HW_FLOAT16 = 2 };

/* What the functions return. */
enum {
  HW_OK = 0,
  HW_NO_MEMORY = 1,
  HW_BAD_CALL = 2,
  HW_NO_SUCH_ISA = 3,
  HW_STOPPED = 4, /* the host wished so; results are unfinished */
  /* Done, with one or both of these: */
  HW_NO_NUMBER = 8, /* the sum of some row is no finite number, as a score of it is none */
  HW_OVERFLOW = 16  /* values are so large, or not finite, that some output of another row is no finite number */
};

/* The runtime that a call comes from. The calling thread leaves it while it computes, enters it again at
   the end, and after every 50 ms for a moment to ask whether to stop. Python's are PyEval_SaveThread,
   PyEval_RestoreThread and PyErr_CheckSignals. */
typedef struct {
  void *(*leave)(void);
  void (*enter)(void *left); /* takes what leave gave */
  int (*stop)(void);         /* not 0: the call ends early; NULL: nobody is asked */
} hw_host;

typedef struct {
  int64_t batch, heads, kv_heads, queries, keys, dim, value_dim;
  int64_t dtype;   /* of q, k, v, out and their gradients; everything else is float32 */
  int64_t threads; /* how many may be used, at least 1 */
  const hw_host *host; /* or NULL */
  float scale;     /* scores are scale * q.k */
  float softcap;   /* c: scores become c * tanh(score / c), c from 2^-120 to 2^120; 0 for none */

  const void *q, *k, *v;                         /* [B, H, T, D], [B, G, S, D], [B, G, S, Dv] */
  int64_t q_stride[3], k_stride[3], v_stride[3]; /* of batch, head, position */

  /* Where queries stand among the keys: position[i], or i + offset where it is NULL. */
  int64_t offset;
  const int64_t *position; /* [T] or NULL */

  /* Who may attend. Everything that is given must allow a pair. */
  int64_t causal;                           /* 1: no key after the query's position */
  int64_t window;                           /* n: only the n keys up to it (needs causal); 0: all */
  const int64_t *low, *high;                /* keys [low, high) of each query, or NULL */
  int64_t low_stride[3], high_stride[3];    /* of batch, head, query; 0 where an axis is shared */
  const uint8_t *allowed;                   /* booleans at [B, H, T, S], or NULL */
  int64_t allowed_stride[4];
  const float *bias;                        /* added to the scores; -inf: may not attend; or NULL */
  int64_t bias_stride[4];
  const float *slopes;                      /* [H]: adds -slope * |position - j|, or NULL */
  const float *sinks;                       /* [H]: one more logit in each row's sum, or NULL */

  /* Of 65536 weights so many are dropped on their way to the output, and the others scaled up to make up for
     them; 0 to 65535. Figures and sums are those of the weights before. dropout.hpp says which are dropped. */
  int64_t dropped;
  uint64_t seed;

  /* Results of hw_forward. With v NULL there is no output, and only the scores are passed over. */
  void *out;               /* [B, H, T, Dv] */
  int64_t out_stride[3];
  float *lse;              /* this and the following [B, H, T], dense; or NULL */
  float *max;              /* the largest score, as it enters the softmax (sinks are no scores) */
  float *entropy;          /* nats, of keys and sink together */
  float *ahead;            /* E[j - position] */
  float *first;            /* probability of key 0, */
  float *previous;         /* of the key before the query's position, */
  float *self;             /* and of the key at it */

  /* hw_backward reads out, lse and those of the figures above that have a gradient, as hw_forward left
     them. The gradients that come in may be NULL where there is none (grad_out too). */
  const void *grad_out;
  int64_t grad_out_stride[3];
  const float *grad_lse, *grad_entropy, *grad_ahead, *grad_first, *grad_previous, *grad_self;
  void *grad_q, *grad_k, *grad_v; /* shapes and dtype of q, k, v; each may be NULL */
  int64_t grad_q_stride[3], grad_k_stride[3], grad_v_stride[3];
  float *grad_sinks;              /* [B, H, T]: each row's share, to be summed; or NULL */

  /* Results of hw_sums, which reads q, k, masks, sinks and lse (with the sink in it). */
  const float *weight;            /* [T]: what each query counts, or NULL for 1 */
  float *received;                /* [B, H, S]: sum over queries of weight * p, or NULL */
  const int32_t *query_block;     /* [T] and [S], ascending, values in [0, blocks): */
  const int32_t *key_block;
  int64_t blocks;
  float *map;                     /* [B, H, blocks, blocks]: sums of weight * p, or NULL */
} hw_call;

/* Output and statistics; or, without values, statistics alone. */
int hw_forward(const hw_call *call, int isa);

/* Gradients of out, lse, entropy, ahead, first, previous and self in q, k, v and the sinks. */
int hw_backward(const hw_call *call, int isa);

/* Column sums and block maps of P, given the log-sum-exp. */
int hw_sums(const hw_call *call, int isa);

/* The instruction sets that this library was built for, richest first. A negative isa above means the
   one that is fastest on this machine, hw_isa_best(). */
int hw_isa_count(void);
const char *hw_isa_name(int isa);
int hw_isa_here(int isa);        /* 1 if this machine can run it */

int hw_isa_best(void);           /* -1 where it can run none */

int hw_interface(void);          /* HW_INTERFACE of the built library */
int64_t hw_call_size(void);      /* sizeof(hw_call), for callers that mirror the struct */

/* Lets the kernel run on the threads of an OpenMP runtime that the process has already: its
   GOMP_parallel. NULL: threads of its own. */
void hw_use_team(void *gomp_parallel);

#ifdef __cplusplus
}
#endif
#endif
