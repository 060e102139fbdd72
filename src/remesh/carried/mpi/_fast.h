/* What the C files of the room share: words of the channel, the futex, and numbers that stand unaligned. What stands
 * where is in _calls.h, which is made from Python's tables.
 */
#ifndef REMESH_FAST_H
#define REMESH_FAST_H

#define _GNU_SOURCE
#define PY_SSIZE_T_CLEAN
#define Py_LIMITED_API 0x030B0000
#include <Python.h>

#include <limits.h>
#include <linux/futex.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdint.h>
#include <string.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include "_calls.h"

typedef _Atomic uint32_t Word;

#define SKIP 0xFFFFFFFFu
enum { GATE_CLOSED = 1 };

static inline Word *word_at(uint64_t address) { return (Word *)(uintptr_t)address; }

static inline void relax(void) {
#if defined(__x86_64__) || defined(__i386__)
    __builtin_ia32_pause();
#endif
}

static inline void futex_wait(Word *word, uint32_t seen, int64_t timeout_us) {
    struct timespec t = {timeout_us / 1000000, (timeout_us % 1000000) * 1000};
    syscall(SYS_futex, word, FUTEX_WAIT, seen, &t, NULL, 0);
}

static inline void futex_wake(Word *word) { syscall(SYS_futex, word, FUTEX_WAKE, INT_MAX, NULL, NULL, 0); }

/* What stands at SLEEPING: the lower half serves or computes; it is in a futex wait, or about to be; or it only gives way
 * to its program, on the program's core, and runs as soon as that gives way in turn.
 */
enum { AWAKE, ASLEEP, GIVES_WAY };

/* Differs between the halves: programs have a clock of their own. */
static inline int64_t now_us(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (int64_t)t.tv_sec * 1000000 + t.tv_nsec / 1000;
}

#define READER(name, type)                              \
    static inline type name(const char *from) {         \
        type value;                                     \
        memcpy(&value, from, sizeof value);             \
        return value;                                   \
    }
READER(read_u32, uint32_t)
READER(read_i32, int32_t)

static inline char *put_32(char *to, uint32_t value) { return memcpy(to, &value, 4), to + 4; }

/* A reply's status, in a body. */
static inline void put_status(char *body, uint8_t status) { *(uint8_t *)body = status; }

/* _records.c and _engine.c: add what they have to the module; -1 with an exception. */
int add_engine(PyObject *module);

#endif
