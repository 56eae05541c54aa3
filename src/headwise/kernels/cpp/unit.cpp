// The kernel for one instruction set: HW_ISA names it, the compiler's flags select it. A unit with HW_BASE only
// adds instructions for bfloat16, and calls that base unit for everything else.
#include "unit.hpp"

#include "backward.hpp"
#include "decode.hpp"
#include "sums.hpp"

#if defined(HW_BASE)
const Unit *HW_UNIT_TABLE(HW_BASE)();
#endif

namespace HW_ISA {

static bool decodes(const Call &c) { return !c.dropped && Decode<Float, false>::serves(c); }

#if defined(HW_BASE)
#if HW_TILES
typedef InTiles In;
#else
typedef InPairs In;
#endif

static const Unit &base() { return *HW_UNIT_TABLE(HW_BASE)(); }

static int forward(const hw_call &call, headwise::Control &control) {
  const Call c(call, control);
  return c.dtype != HW_BFLOAT16 || decodes(c) ? base().forward(call, control) : forward_in<In>(c);
}

static int backward(const hw_call &call, headwise::Control &control) {
  if (call.dtype != HW_BFLOAT16) return base().backward(call, control);
  return Backward<In>(Call(call, control)).run();
}

static int sums(const hw_call &call, headwise::Control &control) {
  if constexpr (!In::TILES)
    if (call.dtype == HW_BFLOAT16) return Sums<In>(Call(call, control)).run();
  return base().sums(call, control);
}
#else
static int decode(const Call &c) {
  if (c.dtype == HW_BFLOAT16) return decode_by<ByBFloat>(c);
  if (c.dtype == HW_FLOAT16) return decode_by<ByHalf>(c);
  return decode_by<Float>(c);
}

static int forward(const hw_call &call, headwise::Control &control) {
  const Call c(call, control);
  return decodes(c) ? decode(c) : forward_in<InFloat>(c);
}

static int backward(const hw_call &call, headwise::Control &control) {
  return Backward<InFloat>(Call(call, control)).run();
}

static int sums(const hw_call &call, headwise::Control &control) { return Sums<InFloat>(Call(call, control)).run(); }
#endif

} // namespace HW_ISA

const Unit *HW_UNIT_TABLE(HW_ISA)() {
  static const Unit unit = {HW_UNIT_NAME(HW_ISA), HW_ISA::forward, HW_ISA::backward, HW_ISA::sums};
  return &unit;
}
