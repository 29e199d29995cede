// SPDX-License-Identifier: Apache-2.0
#include "pool.h"

#include <pthread.h>
#include <signal.h>

#include <atomic>
#include <condition_variable>
#include <mutex>
#include <system_error>
#include <thread>

namespace cedar {
namespace {

constexpr int64_t kMostWorkers = 255;

class Pool {
  public:
    // One caller at a time; the others do their work themselves.
    bool try_enter() { return !busy_.exchange(true, std::memory_order_acquire); }
    void leave() { busy_.store(false, std::memory_order_release); }

    void run(int64_t tasks, int64_t threads, Task task, void* context) {
        {
            std::unique_lock<std::mutex> lock(mutex_);
            grow(threads - 1);
            task_ = task;
            context_ = context;
            tasks_ = tasks;
            next_.store(0, std::memory_order_relaxed);
            seats_ = threads - 1;
            taken_ = 0;
            ++round_;
        }
        wake_.notify_all();
        work(0);
        std::unique_lock<std::mutex> lock(mutex_);
        seats_ = 0;  // a worker that wakes up only now has nothing to do
        done_.wait(lock, [this] { return active_ == 0; });
    }

  private:
    void grow(int64_t workers) {
        if (workers_ >= workers || workers_ >= kMostWorkers) return;
        sigset_t others, before;  // the process's signals are for the threads that expect them; a fault stays a thread's own
        sigfillset(&others);
        for (const int fault : {SIGSEGV, SIGBUS, SIGFPE, SIGILL}) sigdelset(&others, fault);
        pthread_sigmask(SIG_SETMASK, &others, &before);
        while (workers_ < workers && workers_ < kMostWorkers) {
            try {
                std::thread([this] { loop(); }).detach();
            } catch (const std::system_error&) {
                break;  // fewer threads, the same result
            }
            ++workers_;
        }
        pthread_sigmask(SIG_SETMASK, &before, nullptr);
    }

    void work(int64_t worker) {
        for (int64_t task; (task = next_.fetch_add(1, std::memory_order_relaxed)) < tasks_;) task_(context_, task, worker);
    }

    void loop() {
        uint64_t seen = 0;
        std::unique_lock<std::mutex> lock(mutex_);
        for (;;) {
            wake_.wait(lock, [&] { return round_ != seen; });
            seen = round_;
            if (taken_ >= seats_) continue;
            const int64_t worker = ++taken_;
            ++active_;
            lock.unlock();
            work(worker);
            lock.lock();
            if (--active_ == 0) done_.notify_one();
        }
    }

    std::atomic<bool> busy_{false};
    std::mutex mutex_;
    std::condition_variable wake_, done_;
    Task task_ = nullptr;
    void* context_ = nullptr;
    int64_t tasks_ = 0;
    std::atomic<int64_t> next_{0};
    int64_t workers_ = 0, seats_ = 0, taken_ = 0, active_ = 0;
    uint64_t round_ = 0;
};

Pool* pool = new Pool;  // never destroyed: its threads may outlive static destructors

// A child process has none of its parent's threads.
const int at_fork = pthread_atfork(nullptr, nullptr, [] { pool = new Pool; });

}  // namespace

void run_tasks(int64_t tasks, int64_t threads, Task task, void* context) {
    (void)at_fork;
    Pool* const shared = pool;
    if (threads > 1 && tasks > 1 && shared->try_enter()) {
        shared->run(tasks, threads < tasks ? threads : tasks, task, context);
        shared->leave();
        return;
    }
    for (int64_t n = 0; n < tasks; ++n) task(context, n, 0);
}

}  // namespace cedar
