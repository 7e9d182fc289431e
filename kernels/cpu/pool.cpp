#include "pool.h"

#include <pthread.h>
#include <sched.h>
#include <signal.h>

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <mutex>
#include <new>
#include <system_error>
#include <thread>
#include <vector>

#if defined(__x86_64__) || defined(__i386__)
#include <immintrin.h>
#endif

namespace quire {
namespace {

constexpr int64_t MOST_PARTS = 0xffff;
constexpr auto WORKER_SPIN = std::chrono::microseconds(100);  // longer than the Python between two kernels
constexpr auto CALLER_SPIN = std::chrono::microseconds(30);   // then its core is better given to the worker

void relax() {
#if defined(__x86_64__) || defined(__i386__)
    _mm_pause();
#elif defined(__aarch64__)
    asm volatile("yield");
#endif
}

// Whether `done` came true within `limit`.
template <class Done>
bool spin(std::chrono::microseconds limit, const Done& done) {
    const auto end = std::chrono::steady_clock::now() + limit;
    do {
        for (int i = 0; i < 16; ++i) {
            if (done()) return true;
            relax();
        }
    } while (std::chrono::steady_clock::now() < end);
    return false;
}

// While it lives, the calling thread takes no signals, nor do the threads that it starts, ever.
class SignalsBlocked {
  public:
    SignalsBlocked() {
        sigset_t all;
        sigfillset(&all);
        pthread_sigmask(SIG_SETMASK, &all, &before_);
    }
    SignalsBlocked(const SignalsBlocked&) = delete;
    SignalsBlocked& operator=(const SignalsBlocked&) = delete;
    ~SignalsBlocked() { pthread_sigmask(SIG_SETMASK, &before_, nullptr); }

  private:
    sigset_t before_;
};

thread_local bool in_part = false;  // of a job of the pool

class Pool {
  public:
    void run(int64_t count, int64_t parts, int threads, Part part, const void* context) {
        // A thread may not even try to lock a mutex that it holds, as the caller does while it runs parts.
        if (in_part) return part(context, 0, count);
        std::unique_lock<std::mutex> only(callers_, std::try_to_lock);
        if (!only.owns_lock()) return part(context, 0, count);
        parts = std::min(parts, MOST_PARTS);
        add_workers(threads - 1);
        if (threads == static_cast<int>(cpus_.size())) spread();
        // The last job has ended, and no part of this one can be claimed before state_ is set.
        part_ = part, context_ = context, count_ = count, helpers_ = threads - 1;
        failed_ = false, ended_ = 0;
        const uint64_t epoch = (state_ >> 32) + 1;
        state_ = epoch << 32 | static_cast<uint64_t>(parts) << 16;
        if (sleepers_ > 0) {
            std::lock_guard<std::mutex> lock(mutex_);
            work_.notify_all();
        }
        work(0);
        const auto ended = [&] { return ended_ == parts; };
        if (!spin(CALLER_SPIN, ended)) {
            std::unique_lock<std::mutex> lock(mutex_);
            caller_sleeps_ = true;
            end_.wait(lock, ended);
            caller_sleeps_ = false;
        }
        if (failed_) throw std::bad_alloc();
    }

  private:
    static uint64_t parts_of(uint64_t state) { return state >> 16 & 0xffff; }
    static uint64_t next_of(uint64_t state) { return state & 0xffff; }
    bool open_to(int thread) const { return next_of(state_) < parts_of(state_) && thread <= helpers_; }

    // Claims parts and runs them until none is left. Thread 0 is the caller.
    void work(int thread) {
        for (;;) {
            uint64_t state = state_;
            const uint64_t next = next_of(state), parts = parts_of(state);
            if (next >= parts || thread > helpers_) return;
            const Part part = part_;
            const void* context = context_;
            const int64_t count = count_;
            // What was just read belongs to this job if it still has its unclaimed part, for then it has not ended.
            if (!state_.compare_exchange_weak(state, state + 1)) continue;
            in_part = true;
            try {
                part(context, next * count / parts, (next + 1) * count / parts);
            } catch (const std::bad_alloc&) {
                failed_ = true;
            }
            in_part = false;
            if (++ended_ == static_cast<int64_t>(parts) && caller_sleeps_) {
                std::lock_guard<std::mutex> lock(mutex_);
                end_.notify_one();
            }
        }
    }

    [[noreturn]] void serve(int thread) {
        const auto wanted = [=] { return open_to(thread); };
        for (;;) {
            if (!spin(WORKER_SPIN, wanted)) {
                std::unique_lock<std::mutex> lock(mutex_);
                ++sleepers_;
                work_.wait(lock, wanted);
                --sleepers_;
            }
            work(thread);
        }
    }

    // As many as the system has threads and memory for: fewer do the work, and the next job tries again. They take no
    // signals, so that the process's handlers run where it expects them.
    void add_workers(int wanted) {
        if (workers_ >= wanted) return;
        try {
            handles_.reserve(wanted), places_.reserve(wanted);
            if (workers_ == 0) cpus_ = usable_cpus();
            const SignalsBlocked blocked;
            for (; workers_ < wanted; ++workers_) {
                std::thread worker([this, thread = workers_ + 1] { serve(thread); });
                handles_.push_back(worker.native_handle()), places_.push_back(ANYWHERE);
                worker.detach();
            }
        } catch (const std::system_error&) {
        } catch (const std::bad_alloc&) {
        }
    }

    static std::vector<int> usable_cpus() {
        std::vector<int> cpus;
#ifdef __linux__
        cpu_set_t set;
        if (sched_getaffinity(0, sizeof(set), &set) == 0)
            for (int cpu = 0; cpu < CPU_SETSIZE; ++cpu)
                if (CPU_ISSET(cpu, &set)) cpus.push_back(cpu);
#endif
        return cpus;
    }

    // For as many threads as CPUs: each worker keeps to one of its own, none to the caller's. Left to itself, Linux
    // has the caller and a worker share a CPU for milliseconds, above all beside other processes. The caller may be
    // anybody's thread, so it runs where the system puts it, and the worker of that CPU makes way.
    void spread() {
#ifdef __linux__
        const int here = sched_getcpu();
        if (here == caller_place_) return;
        size_t next = 0;
        for (size_t worker = 0; worker < cpus_.size() - 1 && worker < places_.size(); ++worker) {
            if (caller_place_ == ANYWHERE) {
                if (cpus_[next] == here) ++next;
                keep(worker, cpus_[next++]);
            } else if (places_[worker] == here) {
                keep(worker, caller_place_);
            }
        }
        caller_place_ = here;
#endif
    }

#ifdef __linux__
    void keep(size_t worker, int cpu) {
        cpu_set_t set;
        CPU_ZERO(&set);
        CPU_SET(cpu, &set);
        places_[worker] = cpu;
        pthread_setaffinity_np(handles_[worker], sizeof(set), &set);  // refused: the worker stays where it was
    }
#endif

    static constexpr int ANYWHERE = -1;

    // Sequentially consistent all of them: either a sleeper sees the change or the changer sees the sleeper.
    alignas(64) std::atomic<uint64_t> state_{0};  // a job's number << 32 | its parts << 16 | the next to claim
    alignas(64) std::atomic<int64_t> ended_{0};
    alignas(64) std::atomic<int> sleepers_{0};
    std::atomic<bool> caller_sleeps_{false};
    std::atomic<bool> failed_{false};
    std::atomic<Part> part_{nullptr};
    std::atomic<const void*> context_{nullptr};
    std::atomic<int64_t> count_{0};
    std::atomic<int> helpers_{0};
    int workers_ = 0, caller_place_ = ANYWHERE;
    std::vector<int> cpus_, places_;  // which the process may use; of each worker
    std::vector<pthread_t> handles_;
    std::mutex callers_, mutex_;
    std::condition_variable work_, end_;
};

// Never destroyed, because its threads outlive every static object. A forked child has no threads: it starts anew.
Pool* pool = [] {
    pthread_atfork(nullptr, nullptr, [] { pool = new Pool; });
    return new Pool;
}();

}  // namespace

void run_parts(int64_t count, int64_t parts, int threads, Part part, const void* context) {
    pool->run(count, parts, threads, part, context);
}

}  // namespace quire
