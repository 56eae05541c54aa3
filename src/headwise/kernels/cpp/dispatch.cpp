// The plain C interface: selects the instruction set and the threads of a call.
#include "unit.hpp"

#include <cmath>
#include <cstring>
#include <system_error>
#include <vector>

#if defined(__x86_64__) && defined(__linux__)
#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>
#elif defined(__aarch64__) && defined(__linux__)
#include <sys/auxv.h>
#include <sys/prctl.h>
#endif

#define HW_UNIT(isa) const Unit *HW_UNIT_TABLE(isa)();
#include "units.inc"
#undef HW_UNIT

namespace {

typedef void (*GompParallel)(void (*)(void *), void *, unsigned, unsigned);
GompParallel gomp_parallel = nullptr;

const Unit *unit_at(int number) {
  typedef const Unit *(*Table)();
  static const Table tables[] = {
#define HW_UNIT(isa) HW_UNIT_TABLE(isa),
#include "units.inc"
#undef HW_UNIT
  };
  const int count = (int)(sizeof tables / sizeof tables[0]);
  return number >= 0 && number < count ? tables[number]() : nullptr;
}

#if defined(__x86_64__)
// Returns true if this CPU has tiles of bfloat16 and Linux permits the process to use them.
bool tiles_here() {
#if defined(__linux__)
  static const bool found = [] {
    constexpr unsigned BF16 = 1u << 22, TILE = 1u << 24;
    constexpr long ASK = 0x1023, TILE_DATA = 18; // ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA
    unsigned a, b, c, d;
    if (!__get_cpuid_count(7, 0, &a, &b, &c, &d) || (d & (BF16 | TILE)) != (BF16 | TILE)) return false;
    return syscall(SYS_arch_prctl, ASK, TILE_DATA) == 0;
  }();
  return found;
#else
  return false;
#endif
}
#endif

bool runs_here(const char *name) {
#if defined(__x86_64__)
  const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
  const bool avx512 = avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                      __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
  if (!std::strcmp(name, "avx2")) return avx2;
  if (!std::strcmp(name, "avx512")) return avx512;
  const bool bf16 = avx512 && __builtin_cpu_supports("avx512bf16");
  if (!std::strcmp(name, "avx512bf16")) return bf16;
  if (!std::strcmp(name, "amx")) return bf16 && tiles_here();
#elif defined(__aarch64__) && defined(__linux__)
  constexpr unsigned long SVE = 1ul << 22, BF16 = 1ul << 14; // HWCAP_SVE, HWCAP2_BF16
  constexpr int LENGTH = 51;                                 // PR_SVE_GET_VL
  if (!std::strcmp(name, "neonbf16")) return getauxval(AT_HWCAP2) & BF16;
  if (!std::strcmp(name, "sve256")) return (getauxval(AT_HWCAP) & SVE) && (prctl(LENGTH) & 0xffff) == 256 / 8;
#elif defined(__aarch64__)
  if (std::strcmp(name, "neon") && std::strcmp(name, "plain")) return false; // unknown
#endif
  (void)name;
  return true;
}

// Returns true if a unit is known to be fast on this CPU. vdpbf16ps is twice as fast as float32 on AMD CPUs, and
// slower on Intel CPUs (0.55 to 0.66 of its speed), where tiles are fast. ARM's pairs and long vectors have not been
// measured yet, and are used only on request.
bool fast_here(const char *name) {
#if defined(__x86_64__)
  if (!std::strcmp(name, "avx512bf16")) return __builtin_cpu_is("amd");
#endif
  return std::strcmp(name, "neonbf16") && std::strcmp(name, "sve256");
}

// The fastest known unit of this machine.
int best() {
  static const int found = [] {
    for (int i = 0; const Unit *unit = unit_at(i); i++)
      if (runs_here(unit->name) && fast_here(unit->name)) return i;
    return -1;
  }();
  return found;
}

const Unit *chosen(int isa) {
  const Unit *unit = unit_at(isa < 0 ? best() : isa);
  return unit && runs_here(unit->name) ? unit : nullptr;
}

bool makes_sense(const hw_call *c) {
  return c && c->batch > 0 && c->heads > 0 && c->kv_heads > 0 && c->heads % c->kv_heads == 0 && c->queries > 0 &&
         c->keys > 0 && c->keys < INT32_MAX && c->dim > 0 && c->threads > 0 && c->q && c->k &&
         c->window >= 0 && (!c->window || c->causal) && (!c->v || c->value_dim > 0) &&
         c->dropped >= 0 && c->dropped < 65536 && c->dtype >= HW_FLOAT32 && c->dtype <= HW_FLOAT16 &&
         std::isfinite(c->scale) &&
         (c->softcap == 0 || (c->softcap >= 0x1p-120f && c->softcap <= 0x1p120f));
}

bool within(const int32_t *blocks, int64_t count, int64_t end) {
  for (int64_t i = 0; i < count; i++)
    if (blocks[i] < 0 || blocks[i] >= end) return false;
  return true;
}

int run(Unit::Function *function, const hw_call &call) {
  headwise::Control control(call.host);
  const int code = function(call, control);
  if (control.stopped()) return HW_STOPPED;
  return code == HW_OK ? control.found() : code;
}

constexpr std::chrono::milliseconds ASK{50};

} // namespace

namespace headwise {

Control::Control(const hw_host *host)
    : host_(host), caller_(std::this_thread::get_id()), left_(host ? host->leave() : nullptr) {
  if (host) next_ = Clock::now() + ASK;
}

Control::~Control() {
  if (host_) host_->enter(left_);
}

bool Control::ask() {
  if (!host_ || !host_->stop || stopped() || std::this_thread::get_id() != caller_) return stopped();
  if (Clock::now() < next_) return false;
  host_->enter(left_);
  if (host_->stop()) stopped_ = true;
  left_ = host_->leave();
  next_ = Clock::now() + ASK;
  return stopped();
}

void Control::wait_for(const std::atomic<int> &busy) {
  if (!host_ || !host_->stop || std::this_thread::get_id() != caller_) return;
  for (int i = 0; busy > 0 && !stopped(); i++) {
    if (i < 100) { // most calls end soon
      std::this_thread::yield();
    } else {
      std::this_thread::sleep_for(std::chrono::microseconds(50));
      ask();
    }
  }
}

void on_team(int threads, void (*body)(void *), void *data) {
  if (gomp_parallel) return gomp_parallel(body, data, (unsigned)threads, 0);
  std::vector<std::thread> others;
  try {
    for (int i = 1; i < threads; i++) others.emplace_back(body, data);
  } catch (const std::system_error &) { // no more threads can be created: continue with these
  }
  body(data);
  for (std::thread &other : others) other.join();
}

} // namespace headwise

extern "C" {

#define HW_PUBLIC __attribute__((visibility("default")))

HW_PUBLIC int hw_forward(const hw_call *call, int isa) {
  const Unit *unit = chosen(isa);
  if (!unit) return HW_NO_SUCH_ISA;
  if (!makes_sense(call) || (call->v && !call->out)) return HW_BAD_CALL;
  return run(unit->forward, *call);
}

HW_PUBLIC int hw_backward(const hw_call *call, int isa) {
  const Unit *unit = chosen(isa);
  if (!unit) return HW_NO_SUCH_ISA;
  if (!makes_sense(call) || !call->lse) return HW_BAD_CALL;
  if (!call->v && (call->grad_out || call->grad_v)) return HW_BAD_CALL;
  if (call->grad_out && !call->out) return HW_BAD_CALL;
  if ((call->grad_entropy && !call->entropy) || (call->grad_ahead && !call->ahead) ||
      (call->grad_first && !call->first) || (call->grad_previous && !call->previous) ||
      (call->grad_self && !call->self) || (call->grad_sinks && !call->sinks))
    return HW_BAD_CALL;
  return run(unit->backward, *call);
}

HW_PUBLIC int hw_sums(const hw_call *call, int isa) {
  const Unit *unit = chosen(isa);
  if (!unit) return HW_NO_SUCH_ISA;
  if (!makes_sense(call) || !call->lse) return HW_BAD_CALL;
  if (call->map && (!call->query_block || !call->key_block || call->blocks < 1 ||
                    !within(call->query_block, call->queries, call->blocks) ||
                    !within(call->key_block, call->keys, call->blocks)))
    return HW_BAD_CALL;
  return run(unit->sums, *call);
}

HW_PUBLIC int hw_isa_count(void) {
  int count = 0;
  while (unit_at(count)) count++;
  return count;
}

HW_PUBLIC const char *hw_isa_name(int isa) {
  const Unit *unit = unit_at(isa);
  return unit ? unit->name : "";
}

HW_PUBLIC int hw_isa_here(int isa) {
  const Unit *unit = unit_at(isa);
  return unit && runs_here(unit->name);
}

HW_PUBLIC int hw_isa_best(void) { return best(); }

HW_PUBLIC int hw_interface(void) { return HW_INTERFACE; }
HW_PUBLIC int64_t hw_call_size(void) { return sizeof(hw_call); }
HW_PUBLIC void hw_use_team(void *team) { gomp_parallel = (GompParallel)team; }
}
