// Cases of the kernels' threads that Python cannot bring about, each in a process of its own: `pool_cases CASE`.
// It fails with a message unless the case is right.

#include <dlfcn.h>
#include <errno.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>

#include "pool.cpp"

namespace {

constexpr int THREADS = 4;
constexpr int64_t COUNT = 1000;

int threads_left = -1, allocations_left = -1;  // none fails if negative
thread_local bool must_not_lock = false;

bool runs_out(int& left) { return left == 0 || (left > 0 && left-- == 0); }

void require(bool right, const char* what) {
    if (right) return;
    std::fprintf(stderr, "%s\n", what);
    std::_Exit(1);
}

template <class Function>
Function* original(const char* name) {
    return reinterpret_cast<Function*>(dlsym(RTLD_NEXT, name));
}

}  // namespace

// In place of those of the C and C++ libraries.

extern "C" int pthread_create(pthread_t* thread, const pthread_attr_t* with, void* (*body)(void*), void* argument) {
    static const auto create = original<decltype(pthread_create)>("pthread_create");
    return runs_out(threads_left) ? EAGAIN : create(thread, with, body, argument);
}

extern "C" int pthread_mutex_trylock(pthread_mutex_t* mutex) {
    static const auto trylock = original<decltype(pthread_mutex_trylock)>("pthread_mutex_trylock");
    require(!must_not_lock, "a part tried to lock the mutex that its job holds");
    return trylock(mutex);
}

void* operator new(std::size_t size) {
    void* memory = runs_out(allocations_left) ? nullptr : std::malloc(size);
    if (memory == nullptr) throw std::bad_alloc();
    return memory;
}
void operator delete(void* memory) noexcept { std::free(memory); }
void operator delete(void* memory, std::size_t) noexcept { std::free(memory); }

namespace {

// Whether a job runs each of its parts once; false as well if it throws.
bool job_is_right() {
    std::atomic<int> runs[COUNT] = {};
    try {
        quire::parallel_for(COUNT, COUNT, THREADS, [&](int64_t i) { ++runs[i]; });
    } catch (const std::exception& error) {
        std::fprintf(stderr, "the job threw %s\n", error.what());
        return false;
    }
    return std::all_of(std::begin(runs), std::end(runs), [](const std::atomic<int>& count) { return count == 1; });
}

// Returns only if so many threads take part in a job.
void meet(int threads) {
    std::atomic<int> begun{0};
    quire::parallel_for(threads, threads, threads, [&](int64_t) {
        ++begun;
        while (begun < threads) std::this_thread::yield();
    });
}

// The first `given` of what `left` counts are there, which is enough for so many workers; later nothing runs out.
void fewer_threads(int& left, int given, int workers) {
    sigset_t some, after;
    sigemptyset(&some);
    sigaddset(&some, SIGUSR1);
    pthread_sigmask(SIG_SETMASK, &some, nullptr);
    left = given;
    const bool right = job_is_right();
    pthread_sigmask(SIG_SETMASK, nullptr, &after);
    require(sigismember(&after, SIGUSR1) == 1 && sigismember(&after, SIGINT) == 0, "the caller's signals changed");
    require(right, "a job without all of its threads is wrong");
    meet(1 + workers);
    left = -1;
    meet(THREADS);
    require(job_is_right(), "a later job is wrong");
}

void nested() {
    std::atomic<int> wrong{0}, runs{0};
    quire::parallel_for(COUNT, COUNT, THREADS, [&](int64_t) {
        must_not_lock = true;
        const auto caller = std::this_thread::get_id();
        quire::parallel_for(COUNT, COUNT, THREADS, [&](int64_t) {
            ++runs;
            if (std::this_thread::get_id() != caller) ++wrong;
        });
        must_not_lock = false;
    });
    require(wrong == 0, "a nested job left its thread");
    require(runs == COUNT * COUNT, "a nested job is wrong");
    meet(THREADS);
}

}  // namespace

int main(int, char** arguments) {
    const char* name = arguments[1];
    if (std::strcmp(name, "nested") == 0) nested();
    else if (std::strcmp(name, "no-thread") == 0) fewer_threads(threads_left, 0, 0);
    else if (std::strcmp(name, "two-threads") == 0) fewer_threads(threads_left, 2, 2);
    else if (std::strncmp(name, "memory-", 7) == 0) fewer_threads(allocations_left, std::atoi(name + 7), 0);
    else return 2;
    std::_Exit(0);  // the pool's threads run on
}
