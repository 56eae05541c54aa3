// Threads for a call: tasks are handed out one by one, and every task writes results of its own, so
// that nothing depends on who takes which.
#pragma once

#include <atomic>
#include <cstdint>
#include <cstdlib>

namespace headwise {

// Runs body(data) on so many threads at once and waits for them.
void on_team(int threads, void (*body)(void *), void *data);

// Memory for one thread's task, cut into pieces that start at cache lines.
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

// Calls work(task, scratch) for every task below `tasks`; false if there was no memory.
template <class Work>
bool for_each_task(int64_t tasks, int64_t threads, int64_t scratch_bytes, const Work &work) {
  struct Shared {
    std::atomic<int64_t> next{0};
    std::atomic<bool> failed{false};
    int64_t tasks, bytes;
    const Work *work;
  } shared;
  shared.tasks = tasks;
  shared.bytes = scratch_bytes;
  shared.work = &work;
  auto body = [](void *data) {
    Shared &all = *(Shared *)data;
    int64_t task = all.next.fetch_add(1, std::memory_order_relaxed);
    if (task >= all.tasks) return;
    Scratch scratch(all.bytes);
    if (!scratch) {
      all.failed = true;
      return;
    }
    for (; task < all.tasks; task = all.next.fetch_add(1, std::memory_order_relaxed)) {
      scratch.clear();
      (*all.work)(task, scratch);
    }
  };
  int64_t crew = threads < tasks ? threads : tasks;
  if (crew <= 1)
    body(&shared);
  else
    on_team((int)crew, body, &shared);
  return !shared.failed;
}

} // namespace headwise
