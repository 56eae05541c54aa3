// The functions of each instruction set's unit, for the dispatcher.
#pragma once

#include "team.hpp"

struct Unit {
  typedef int Function(const hw_call &, headwise::Control &);
  const char *name;
  Function *forward, *backward, *sums;
};

#define HW_JOIN_(a, b) a##b
#define HW_JOIN(a, b) HW_JOIN_(a, b)
#define HW_TEXT_(a) #a
#define HW_TEXT(a) HW_TEXT_(a)
#define HW_UNIT_TABLE(isa) HW_JOIN(hw_unit_, isa)
#define HW_UNIT_NAME(isa) HW_TEXT(isa)
