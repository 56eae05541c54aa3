// What each instruction set's unit offers to the dispatcher.
#pragma once

#include "headwise.h"

struct Unit {
  const char *name;
  int (*forward)(const hw_call &);
  int (*backward)(const hw_call &);
  int (*sums)(const hw_call &);
};

#define HW_JOIN_(a, b) a##b
#define HW_JOIN(a, b) HW_JOIN_(a, b)
#define HW_TEXT_(a) #a
#define HW_TEXT(a) HW_TEXT_(a)
#define HW_UNIT_TABLE(isa) HW_JOIN(hw_unit_, isa)
#define HW_UNIT_NAME(isa) HW_TEXT(isa)
