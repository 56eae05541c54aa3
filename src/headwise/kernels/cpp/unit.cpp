// The kernel for one instruction set: HW_ISA names it, the compiler's flags choose it.
#include "unit.hpp"

#include "backward.hpp"
#include "decode.hpp"
#include "sums.hpp"

const Unit *HW_UNIT_TABLE(HW_ISA)() {
  static const Unit unit = {HW_UNIT_NAME(HW_ISA), HW_ISA::attention, HW_ISA::backward, HW_ISA::sums};
  return &unit;
}
