// Threads of an emulated block as fibers of one CPU thread, for emulation.h and mla_attention's emulation.
#pragma once
#include <setjmp.h>
#include <ucontext.h>

#include <vector>

namespace emulated {
struct Fiber { ucontext_t context; jmp_buf at; std::vector<char> stack; bool begun = false, done = false; };
static std::vector<Fiber> fibers;
static jmp_buf scheduler;
static int current;
// Jumps, for swapcontext asks the kernel for the signal mask every time; fibers live on from block to block for the same reason.
inline void leave() { if (!_setjmp(fibers[current].at)) _longjmp(scheduler, 1); }
// From the scheduler into a fiber, until it leaves. One that has not begun calls `run`, which does not return, on a stack of so many
// bytes.
inline void enter(Fiber& f, void (*run)(), size_t stack) {
  if (_setjmp(scheduler)) return;
  if (f.begun) _longjmp(f.at, 1);
  f.begun = true;
  f.stack.resize(stack);
  getcontext(&f.context);
  f.context.uc_stack.ss_sp = f.stack.data();
  f.context.uc_stack.ss_size = f.stack.size();
  f.context.uc_link = nullptr;
  makecontext(&f.context, run, 0);
  setcontext(&f.context);
}
}  // namespace emulated
