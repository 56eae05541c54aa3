// Threads of a call. Tasks are assigned one by one and write separate results, so that results do not
// depend on the assignment.
#pragma once

#include "headwise.h"

#include <atomic>
#include <chrono>
#include <cstdint>
#include <cstdlib>
#include <thread>

namespace headwise {

// Runs body(data) on so many threads (or as many as are available) and waits for them.
void on_team(int threads, void (*body)(void *), void *data);

// State that the threads of one call share: whether the host requests a stop, and the status. It is created by the
// calling thread, the only one that polls the host; until the end of the call, that thread has left the host.
class Control {
public:
  explicit Control(const hw_host *host);
  ~Control();
  Control(const Control &) = delete;
  Control &operator=(const Control &) = delete;

  bool stopped() const { return stopped_.load(std::memory_order_relaxed); }
  bool ask();                                  // the same, after polling the host if it is time to
  void wait_for(const std::atomic<int> &busy); // until no thread is busy, or all must stop

  void found(int what) { found_.fetch_or(what, std::memory_order_relaxed); } // HW_NO_NUMBER, HW_OVERFLOW
  int found() const { return found_.load(std::memory_order_relaxed); }

private:
  typedef std::chrono::steady_clock Clock;
  const hw_host *const host_;
  const std::thread::id caller_;
  void *left_ = nullptr;
  Clock::time_point next_;
  std::atomic<bool> stopped_{false};
  std::atomic<int> found_{HW_OK};
};

// Polls from one thread, only at every 16th step, because reading the clock is slow.
class Steps {
public:
  explicit Steps(Control &control) : control_(control) {}
  bool stopped() { return control_.stopped() || (++number_ % 16 == 0 && control_.ask()); }

private:
  Control &control_;
  unsigned number_ = 0;
};

// Memory of one thread's task, in pieces that are aligned to cache lines.
class Scratch {
public:
  explicit Scratch(int64_t bytes)
      : start_((char *)std::aligned_alloc(64, (size_t)((bytes + 63) / 64 * 64))), next_(start_) {}
  ~Scratch() { std::free(start_); }
  Scratch(const Scratch &) = delete;
  Scratch &operator=(const Scratch &) = delete;

  explicit operator bool() const { return start_ != nullptr; }
  void clear() { next_ = start_; }

  template <class T> T *take(int64_t count) {
    T *found = (T *)next_;
    next_ += size_of<T>(count);
    return found;
  }
  template <class T> static int64_t size_of(int64_t count) {
    return (count * (int64_t)sizeof(T) + 63) / 64 * 64;
  }

private:
  char *start_, *next_;
};

// Calls work(task, scratch) for every task below `tasks`, or fewer if the call is stopped; returns false if
// memory cannot be allocated.
template <class Work>
bool for_each_task(Control &control, int64_t tasks, int64_t threads, int64_t scratch_bytes, const Work &work) {
  struct Shared {
    std::atomic<int64_t> next{0};
    std::atomic<int> busy{0};
    std::atomic<bool> failed{false};
    Control *control;
    int64_t tasks, bytes;
    const Work *work;

    void work_on() {
      int64_t task = next.fetch_add(1, std::memory_order_relaxed);
      if (task >= tasks) return;
      Scratch scratch(bytes);
      if (!scratch) {
        failed = true;
        return;
      }
      Steps steps(*control);
      for (; task < tasks && !steps.stopped(); task = next.fetch_add(1, std::memory_order_relaxed)) {
        scratch.clear();
        (*work)(task, scratch);
      }
    }
  } shared;
  shared.control = &control;
  shared.tasks = tasks;
  shared.bytes = scratch_bytes;
  shared.work = &work;
  auto body = [](void *data) {
    Shared &all = *(Shared *)data;
    all.busy++;
    all.work_on();
    all.busy--;
    all.control->wait_for(all.busy);
  };
  int64_t crew = threads < tasks ? threads : tasks;
  if (crew <= 1)
    shared.work_on();
  else
    on_team((int)crew, body, &shared);
  return !shared.failed;
}

} // namespace headwise
