/* The region of addresses that the lower half lives in, and what else belongs to it.
 *
 * Whatever the lower half gets from the kernel is known here: its memory by its addresses, its descriptors, threads and
 * System V segments by lists. Memory that must be at one address, since processes share pointers in it, is a stray. For
 * that the system calls that bring or take away something are served here (sites.c makes its code call us). So all of
 * it can be left out of an image, or dropped, and the program is what it was before.
 *
 * What belongs to a thread of the program stays the program's: what a C library tells the kernel of a new thread, and
 * handlers of signals, are not taken from the lower half.
 *
 * A thread is inside of the lower half here: no C library, no thread-local storage, no register beside the general ones.
 */
#pragma GCC target("general-regs-only")
#include "region.h"

#include <asm/unistd.h>
#include <errno.h>
#include <fcntl.h>
#include <linux/mman.h>
#include <linux/time_types.h>
#include <sys/ipc.h>
#include <sys/mman.h>

#include "raw.h"
#include "sites.h"

#define HUGE 0x200000ul
#define NEAR_MOST_BYTES (256l << 20) /* of a file that may hold code */
enum { STUB_BYTES = 1 << 18, LEAVE = 16 /* SIGSTKFLT, which nothing on x86-64 sends */ };

typedef struct {
    _Atomic int tid;         /* 0: none */
    _Atomic bool is_cloning; /* it is about to have a child, which is not noted yet; never so at its end */
} Thread;

typedef struct {
    uint64_t handler, flags, restorer, mask;
} Action;

typedef struct {
    uint64_t at, num_bytes;
} Stray;

/* A part of the region: its addresses are given out in turn, so that few are asked for twice. */
typedef struct {
    uint64_t start, end, next;
} Part;

static struct {
    _Atomic int lock;
    Part code, data;
    Stubs stubs;
    int pid;
    Context *way_back;
    int status;
    Thread threads[MAX_THREADS]; /* of the lower half; some have ended */
    _Atomic uint64_t descriptors[MAX_DESCRIPTORS]; /* what it is, not 0, where it is the lower half's */
    _Atomic int end_of_descriptors;                /* behind the highest that was ever noted */
    int segments[MAX_SEGMENTS], num_segments;
    Stray strays[MAX_STRAYS]; /* those of 0 bytes are none */
    Action actions[65]; /* of the lower half for signals: told to it, and never done */
} region;

/* Words at the start of the region, in reach of the stubs. */
typedef struct {
    void (*serve)(void), (*before)(void), (*after)(void);
} Ways;

void enter_serve_lower(void);
void enter_before_clone(void);
void enter_after_clone(void);
void return_from_signal(void);

/* ---- what is served ---- */

static uint64_t served[MAX_CALLS / 64];
static const uint16_t brings_descriptor[] = {
    __NR_open, __NR_openat, __NR_openat2, __NR_creat, __NR_socket, __NR_accept, __NR_accept4, __NR_dup, __NR_dup2, __NR_dup3,
    __NR_eventfd, __NR_eventfd2, __NR_epoll_create, __NR_epoll_create1, __NR_memfd_create, __NR_signalfd, __NR_signalfd4,
    __NR_timerfd_create, __NR_inotify_init, __NR_inotify_init1, __NR_pidfd_open, __NR_pidfd_getfd, __NR_userfaultfd,
    __NR_perf_event_open, __NR_io_uring_setup, __NR_open_by_handle_at, __NR_fanotify_init, __NR_memfd_secret, __NR_bpf};
static const uint16_t others[] = {
    __NR_mmap, __NR_munmap, __NR_brk, __NR_mremap, __NR_shmat, __NR_shmget, __NR_socketpair, __NR_pipe, __NR_pipe2, __NR_fcntl,
    __NR_recvmsg, __NR_recvmmsg, __NR_close, __NR_close_range, __NR_rt_sigprocmask, __NR_rt_sigaction, __NR_sigaltstack,
    __NR_set_tid_address, __NR_set_robust_list, __NR_rseq, __NR_exit_group, __NR_clone, __NR_clone3};

static bool is_one_of(const uint16_t *numbers, size_t count, long number) {
    for (size_t i = 0; i < count; i++)
        if (numbers[i] == number) return true;
    return false;
}
#define IS_ONE_OF(numbers, number) is_one_of(numbers, sizeof numbers / sizeof *numbers, number)

static void list_served(void) {
    for (unsigned n = 0; n < MAX_CALLS; n++)
        if (IS_ONE_OF(brings_descriptor, n) || IS_ONE_OF(others, n)) served[n / 64] |= 1ul << n % 64;
}

static void lock(void) {
    for (int tries = 0; atomic_exchange_explicit(&region.lock, 1, memory_order_acquire); tries++)
        if (tries % 64 == 63) raw(__NR_sched_yield, 0, 0, 0, 0);
}
static void unlock(void) { atomic_store_explicit(&region.lock, 0, memory_order_release); }

/* A child that shares our memory, as posix_spawn's, has descriptors of its own. */
static bool is_this_process(void) { return raw(__NR_getpid, 0, 0, 0, 0) == region.pid; }

/* ---- memory ---- */

static uint64_t take_addresses(Part *part, size_t num_bytes, uint64_t align) {
    lock();
    uint64_t at = (part->next + align - 1) & ~(align - 1);
    if (at + num_bytes > part->end) at = (part->start + align - 1) & ~(align - 1);
    part->next = at + PAGE_UP(num_bytes);
    unlock();
    return at + num_bytes > part->end ? 0 : at;
}

long map_in_region(size_t num_bytes, int protection, int flags, int fd, long offset, bool near) {
    uint64_t align = num_bytes >= HUGE ? HUGE : PAGE;
    unsigned huge = (unsigned)flags >> MAP_HUGE_SHIFT & MAP_HUGE_MASK;
    if (flags & MAP_HUGETLB && huge > 21) align = 1ul << huge;
    flags = (flags & ~MAP_32BIT) | MAP_FIXED_NOREPLACE;
    Part *part = near ? &region.code : &region.data;
    long result;
    size_t passed = 0;
    do {
        uint64_t at = take_addresses(part, num_bytes, align);
        result = at ? raw6(__NR_mmap, (long)at, (long)num_bytes, protection, flags, fd, offset) : -ENOMEM;
        passed += num_bytes;
    } while (result == -EEXIST && passed < part->end - part->start);
    return result == -EEXIST ? -ENOMEM : result;
}

int rewrite_code(unsigned char *code, size_t num_bytes) {
    if (!has_sites(&region.stubs, code, num_bytes)) return 0;
    uint64_t from = (uint64_t)code & ~(PAGE - 1);
    size_t whole = PAGE_UP((uint64_t)code + num_bytes) - from;
    if (raw(__NR_mprotect, from, whole, PROT_READ | PROT_WRITE, 0) < 0) return -1;
    lock();
    int count = rewrite_sites(&region.stubs, code, num_bytes);
    unlock();
    if (raw(__NR_mprotect, from, whole, PROT_READ | PROT_EXEC, 0) < 0) return -1;
    return count;
}

/* Memory at an address outside of the region that the lower half wishes for; it fails where something lies, or where there
 * are too many.
 */
static long map_stray(const long *call) {
    lock();
    Stray *stray = NULL;
    for (int i = 0; i < MAX_STRAYS && !stray; i++)
        if (region.strays[i].num_bytes == 0) stray = &region.strays[i];
    if (stray) *stray = (Stray){(uint64_t)call[1], PAGE_UP((uint64_t)call[2])};
    unlock();
    if (!stray) return -ENOMEM;
    long result = raw6(__NR_mmap, call[1], call[2], call[3], call[4] | MAP_FIXED_NOREPLACE, call[5], call[6]);
    if (result != call[1]) stray->num_bytes = 0;
    return result;
}

static bool is_in_stray(uint64_t at, size_t num_bytes) {
    for (int i = 0; i < MAX_STRAYS; i++) {
        const Stray *stray = &region.strays[i];
        if (at >= stray->at && at + num_bytes <= stray->at + stray->num_bytes) return true;
    }
    return false;
}

static long serve_munmap(const long *call) {
    uint64_t from = (uint64_t)call[1], end = from + PAGE_UP((uint64_t)call[2]);
    long result = raw(__NR_munmap, call[1], call[2], 0, 0);
    if (result < 0 || is_in_region(from)) return result;
    lock();
    for (int i = 0; i < MAX_STRAYS; i++) {
        Stray *stray = &region.strays[i];
        uint64_t end_of_stray = stray->at + stray->num_bytes;
        if (!stray->num_bytes || from >= end_of_stray || end <= stray->at) continue;
        /* One that loses its middle keeps its head alone: its tail could become the program's. */
        if (from <= stray->at) stray->at = end < end_of_stray ? end : end_of_stray;
        else end_of_stray = from;
        stray->num_bytes = end_of_stray - stray->at;
    }
    unlock();
    return result;
}

static long serve_mmap(const long *call) {
    uint64_t at = (uint64_t)call[1];
    size_t num_bytes = (size_t)call[2];
    int protection = (int)call[3], flags = (int)call[4], fd = (int)call[5];
    long result;
    if (flags & (MAP_FIXED | MAP_FIXED_NOREPLACE)) {
        if (!is_in_region(at) && !is_in_stray(at, num_bytes)) return flags & MAP_FIXED_NOREPLACE ? -EEXIST : -ENOMEM;
        result = raw6(__NR_mmap, call[1], call[2], call[3], call[4], call[5], call[6]);
    } else if (at && !is_in_region(at) && (result = map_stray(call)) == (long)at) {
        return result;
    } else {
        /* A library is mapped as a whole first, readable, then part after part over it: it has to be near from the start. */
        bool near = !(flags & MAP_ANONYMOUS) && !(flags & MAP_SHARED) && call[2] < NEAR_MOST_BYTES;
        result = map_in_region(num_bytes, protection, flags, fd, call[6], near);
    }
    if (result > 0 && protection & PROT_EXEC && !(flags & MAP_ANONYMOUS)) {
        /* A loader maps more than the file has, and covers the rest later. */
        unsigned long file[18];
        if (raw(__NR_fstat, fd, file, 0, 0) < 0) return result;
        long there = (long)file[6] - call[6];
        if (there > 0 && rewrite_code((unsigned char *)result, (size_t)(there < call[2] ? there : call[2])) < 0) {
            raw(__NR_munmap, result, num_bytes, 0, 0);
            return -ENOMEM;
        }
    }
    return result;
}

static long serve_mremap(const long *call) {
    long from = call[1], old_bytes = call[2], num_bytes = call[3], flags = call[4];
    if (flags & MREMAP_FIXED) {
        if (!is_in_region((uint64_t)call[5])) return -ENOMEM;
        return raw6(__NR_mremap, from, old_bytes, num_bytes, flags, call[5], 0);
    }
    if (!(flags & MREMAP_DONTUNMAP)) {
        long result = raw(__NR_mremap, from, old_bytes, num_bytes, 0);
        if (result != -ENOMEM || !(flags & MREMAP_MAYMOVE)) return result;
    }
    long to = map_in_region((size_t)num_bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0, false);
    if (to < 0) return to;
    long result = raw6(__NR_mremap, from, old_bytes, num_bytes, flags | MREMAP_FIXED, to, 0);
    if (result < 0) raw(__NR_munmap, to, num_bytes, 0, 0);
    return result;
}

/* ---- System V segments ---- */

typedef struct {
    char permissions[48];
    uint64_t num_bytes, times[3];
    int creator, last;
    uint64_t others[4];
} Segment;

static long serve_shmat(const long *call) {
    Segment segment;
    long result = raw(__NR_shmctl, call[1], IPC_STAT, &segment, 0);
    if (result < 0) return result;
    if (call[2] && is_in_region((uint64_t)call[2])) return raw(__NR_shmat, call[1], call[2], call[3], 0);
    size_t passed = 0;
    do {
        uint64_t at = take_addresses(&region.data, segment.num_bytes, PAGE);
        result = at ? raw(__NR_shmat, call[1], at, call[3], 0) : -ENOMEM;
        passed += segment.num_bytes;
    } while (result == -EINVAL && passed < region.data.end - region.data.start); /* EINVAL: something lies there */
    return result;
}

static long serve_shmget(const long *call) {
    Segment segment;
    long result = raw(__NR_shmget, call[1], call[2], call[3], 0);
    if (result < 0 || raw(__NR_shmctl, result, IPC_STAT, &segment, 0) < 0 || segment.creator != region.pid) return result;
    lock();
    bool is_known = false;
    for (int i = 0; i < region.num_segments; i++) is_known = is_known || region.segments[i] == (int)result;
    if (!is_known && region.num_segments < MAX_SEGMENTS) region.segments[region.num_segments++] = (int)result;
    unlock();
    return result;
}

/* ---- descriptors ---- */

/* What an open descriptor is: equal numbers may come back as another file. Never 0. */
static uint64_t identity_of(int fd) {
    unsigned long file[18];
    if (raw(__NR_fstat, fd, file, 0, 0) < 0) return 0;
    return (file[0] * 0x9e3779b97f4a7c15ul ^ file[1]) | 1ul << 63;
}
static void note_descriptor(long fd) {
    if (fd < 0 || fd >= MAX_DESCRIPTORS || !is_this_process()) return;
    atomic_store(&region.descriptors[fd], identity_of((int)fd));
    for (int end = atomic_load(&region.end_of_descriptors); end <= fd;)
        if (atomic_compare_exchange_weak(&region.end_of_descriptors, &end, (int)fd + 1)) break;
}
static void forget_descriptors(uint64_t first, uint64_t last) {
    if (!is_this_process()) return;
    uint64_t end = (uint64_t)atomic_load(&region.end_of_descriptors);
    for (uint64_t fd = first; fd <= last && fd < end; fd++)
        if (atomic_load_explicit(&region.descriptors[fd], memory_order_relaxed)) atomic_store(&region.descriptors[fd], 0);
}
void give_descriptor(int fd) { note_descriptor(fd); }

typedef struct {
    void *name;
    uint64_t name_bytes;
    void *parts;
    uint64_t num_parts;
    char *control;
    uint64_t control_bytes;
    uint64_t flags;
} Message;
typedef struct {
    uint64_t num_bytes; /* with this head */
    int level, type;
} Control;

static void note_received(const Message *message) {
    enum { SOCKET_LEVEL = 1, RIGHTS = 1 };
    for (uint64_t at = 0; at + sizeof(Control) <= message->control_bytes;) {
        const Control *control = (const Control *)(const void *)(message->control + at);
        if (control->num_bytes < sizeof *control) return;
        const int *fds = (const int *)(control + 1);
        size_t count = (control->num_bytes - sizeof *control) / sizeof *fds;
        for (size_t i = 0; control->level == SOCKET_LEVEL && control->type == RIGHTS && i < count; i++) note_descriptor(fds[i]);
        at += (control->num_bytes + 7) & ~7ul;
    }
}

static long serve_descriptors(const long *call) {
    long result;
    switch (call[0]) {
    case __NR_close:
        /* Before: whoever gets the number next may be the program. */
        forget_descriptors((uint64_t)call[1], (uint64_t)call[1]);
        return raw(__NR_close, call[1], 0, 0, 0);
    case __NR_close_range:
        if (!(call[3] & 4 /* CLOSE_RANGE_CLOEXEC */)) forget_descriptors((uint32_t)call[1], (uint32_t)call[2]);
        return raw(__NR_close_range, call[1], call[2], call[3], 0);
    case __NR_fcntl:
        result = raw(__NR_fcntl, call[1], call[2], call[3], 0);
        if (call[2] == F_DUPFD || call[2] == F_DUPFD_CLOEXEC) note_descriptor(result);
        return result;
    case __NR_socketpair: case __NR_pipe: case __NR_pipe2: {
        result = raw(call[0], call[1], call[2], call[3], call[4]);
        const int *pair = (const int *)(call[0] == __NR_socketpair ? call[4] : call[1]);
        for (int i = 0; result == 0 && i < 2; i++) note_descriptor(pair[i]);
        return result;
    }
    case __NR_recvmsg:
        result = raw(__NR_recvmsg, call[1], call[2], call[3], 0);
        if (result >= 0) note_received((const Message *)call[2]);
        return result;
    case __NR_recvmmsg: {
        typedef struct { Message message; uint64_t num_bytes; } Many;
        result = raw6(__NR_recvmmsg, call[1], call[2], call[3], call[4], call[5], 0);
        for (long i = 0; i < result; i++) note_received(&((const Many *)call[2])[i].message);
        return result;
    }
    default:
        result = raw6(call[0], call[1], call[2], call[3], call[4], call[5], call[6]);
        note_descriptor(result);
        return result;
    }
}

/* ---- threads and signals ---- */

static int64_t now_ns(void) {
    struct __kernel_timespec now = {0, 0};
    raw(__NR_clock_gettime, 1 /* CLOCK_MONOTONIC */, &now, 0, 0);
    return now.tv_sec * 1000000000 + now.tv_nsec;
}
static bool is_alive(int tid) { return raw(__NR_tgkill, region.pid, tid, 0, 0) == 0; }

static Thread *thread_of(int tid) {
    for (int i = 0; i < MAX_THREADS; i++)
        if (atomic_load(&region.threads[i].tid) == tid) return &region.threads[i];
    return NULL;
}
static Thread *this_thread(void) { return thread_of((int)raw(__NR_gettid, 0, 0, 0, 0)); }
static bool is_own_thread(void) { return this_thread() != NULL; }

static void note_thread(int tid) {
    lock();
    if (!thread_of(tid)) {
        Thread *place = thread_of(0);
        for (int i = 0; !place && i < MAX_THREADS; i++)
            if (!is_alive(region.threads[i].tid)) place = &region.threads[i];
        if (place) atomic_store(&place->tid, tid);
    }
    unlock();
}

/* Around a call that makes a thread or a process. Whoever makes one does not end in between, so no child is overlooked:
 * it is noted by its parent, and by itself, as it may have children of its own before.
 */
long before_clone(const long *call);
long after_clone(const long *call);
long before_clone(const long *call) {
    Thread *own = is_this_process() ? this_thread() : NULL;
    (void)call;
    if (own) atomic_store(&own->is_cloning, true);
    return 0;
}
long after_clone(const long *call) {
    int child = (int)call[0];
    if (!is_this_process()) return child;
    if (child == 0) note_thread((int)raw(__NR_gettid, 0, 0, 0, 0));
    else if (child > 0 && is_alive(child)) note_thread(child); /* a process is not found among our threads */
    Thread *own = this_thread();
    if (own) atomic_store(&own->is_cloning, false);
    return child;
}

/* Threads of the lower half get the signals that their own faults raise, the one that ends them, and no other. */
static uint64_t own_mask(void) {
    static const uint8_t open[] = {4 /* ILL */, 5 /* TRAP */, 7 /* BUS */, 8 /* FPE */, 11 /* SEGV */, 31 /* SYS */, LEAVE};
    uint64_t mask = ~0ul;
    for (unsigned i = 0; i < sizeof open; i++) mask &= ~(1ul << (open[i] - 1));
    return mask;
}

static long serve_signals(const long *call) {
    if (call[0] == __NR_rt_sigaction) {
        if (!is_this_process()) return raw(__NR_rt_sigaction, call[1], call[2], call[3], call[4]);
        if (call[1] < 1 || call[1] > 64) return -EINVAL;
        Action *action = &region.actions[call[1]];
        Action before = *action;
        if (call[2]) *action = *(const Action *)call[2];
        if (call[3]) *(Action *)call[3] = before;
        return 0;
    }
    if (!call[2] || !is_own_thread()) return raw(call[0], call[1], call[2], call[3], call[4]);
    uint64_t mask = own_mask();
    return raw(__NR_rt_sigprocmask, 2 /* SIG_SETMASK */, &mask, call[3], sizeof mask);
}

static long end_process(long status) {
    if (region.way_back && is_this_process() && !is_own_thread()) {
        region.status = (int)status;
        go_on(region.way_back);
    }
    return raw(__NR_exit_group, status, 0, 0, 0);
}

static long serve_thread(const long *call) {
    switch (call[0]) {
    case __NR_exit_group: return end_process(call[1]);
    case __NR_set_tid_address: return is_own_thread() ? raw(call[0], call[1], 0, 0, 0) : raw(__NR_gettid, 0, 0, 0, 0);
    case __NR_rseq: return is_own_thread() ? raw(call[0], call[1], call[2], call[3], call[4]) : -ENOSYS;
    default: /* set_robust_list, sigaltstack */
        return is_own_thread() || !is_this_process() ? raw(call[0], call[1], call[2], 0, 0) : 0;
    }
}

/* ---- every call ---- */

long serve_lower(const long *call);
long serve_lower(const long *call) {
    switch (call[0]) {
    case __NR_mmap: return serve_mmap(call);
    case __NR_munmap: return serve_munmap(call);
    case __NR_brk: return (long)REGION_START; /* nothing: malloc takes mmap then */
    case __NR_mremap: return serve_mremap(call);
    case __NR_shmat: return serve_shmat(call);
    case __NR_shmget: return serve_shmget(call);
    case __NR_rt_sigaction: case __NR_rt_sigprocmask: return serve_signals(call);
    case __NR_exit_group: case __NR_set_tid_address: case __NR_rseq: case __NR_set_robust_list:
    case __NR_sigaltstack: return serve_thread(call);
    case __NR_close: case __NR_close_range: case __NR_fcntl: case __NR_socketpair: case __NR_pipe: case __NR_pipe2:
    case __NR_recvmsg: case __NR_recvmmsg: return serve_descriptors(call);
    default:
        if (IS_ONE_OF(brings_descriptor, call[0])) return serve_descriptors(call);
        return raw6(call[0], call[1], call[2], call[3], call[4], call[5], call[6]);
    }
}

/* ---- begin and end ---- */

bool open_region(void) {
    list_served();
    region.pid = (int)raw(__NR_getpid, 0, 0, 0, 0);
    /* Nothing of the program may lie there; what is asked for without an address never comes there by itself. */
    int flags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED_NOREPLACE;
    if (raw6(__NR_mmap, REGION_START, REGION_BYTES, PROT_NONE, flags, -1, 0) != (long)REGION_START) return false;
    raw(__NR_munmap, REGION_START, REGION_BYTES, 0, 0);
    int protection = PROT_READ | PROT_WRITE | PROT_EXEC;
    flags &= ~MAP_NORESERVE;
    if (raw6(__NR_mmap, REGION_START, STUB_BYTES, protection, flags, -1, 0) != (long)REGION_START) return false;
    Ways *ways = (Ways *)REGION_START;
    *ways = (Ways){enter_serve_lower, enter_before_clone, enter_after_clone};
    region.stubs = (Stubs){(unsigned char *)(ways + 1), (unsigned char *)(REGION_START + STUB_BYTES),
                           &ways->serve, &ways->before, &ways->after, served};
    region.code = (Part){REGION_START + STUB_BYTES, REGION_START + CODE_BYTES, REGION_START + STUB_BYTES};
    region.data = (Part){REGION_START + CODE_BYTES, REGION_START + REGION_BYTES, REGION_START + CODE_BYTES};
    return true;
}

void set_way_back(Context *back) {
    region.way_back = back;
    if (back) region.status = -1;
}
int status_of_end(void) { return region.status; }

Belongings count_belongings(void) {
    Belongings found = {0, 0, region.num_segments, 0};
    for (int i = 0; i < MAX_STRAYS; i++) found.num_strays += region.strays[i].num_bytes != 0;
    for (int i = 0; i < MAX_THREADS; i++) found.num_threads += region.threads[i].tid && is_alive(region.threads[i].tid);
    for (int fd = 0; fd < region.end_of_descriptors; fd++) {
        uint64_t what = atomic_load_explicit(&region.descriptors[fd], memory_order_relaxed);
        found.num_descriptors += what && identity_of(fd) == what;
    }
    return found;
}

/* On a thread of the lower half, whose stack goes next. One that ended long ago may have left its number to another. */
static void leave(int signal) {
    (void)signal;
    Thread *own = this_thread();
    bool is_other = !is_in_region((uint64_t)__builtin_frame_address(0));
    if (is_other && own) atomic_store(&own->tid, 0);
    if (!is_other && !(own && atomic_load(&own->is_cloning))) raw(__NR_exit, 0, 0, 0, 0);
}

/* Every thread of the lower half ends; how many did not. */
static int end_threads(int64_t patience_ms) {
    Action action = {(uint64_t)leave, 0x04000000 /* SA_RESTORER */, (uint64_t)return_from_signal, 0}, before;
    if (raw(__NR_rt_sigaction, LEAVE, &action, &before, 8) < 0) return MAX_THREADS;
    int64_t began = now_ns();
    int left;
    do {
        left = 0;
        for (int i = 0; i < MAX_THREADS; i++) {
            int tid = atomic_load(&region.threads[i].tid);
            if (tid && raw(__NR_tgkill, region.pid, tid, LEAVE, 0) < 0) atomic_store(&region.threads[i].tid, 0);
            else left += tid != 0;
        }
        struct __kernel_timespec moment = {0, 200000};
        if (left) raw(__NR_nanosleep, &moment, 0, 0, 0);
    } while (left && now_ns() - began < patience_ms * 1000000);
    raw(__NR_rt_sigaction, LEAVE, &before, 0, 8);
    return left;
}

int drop_region(int64_t patience_ms) {
    int left = end_threads(patience_ms);
    if (left) return left;
    for (int fd = 0; fd < region.end_of_descriptors; fd++) {
        uint64_t what = atomic_load_explicit(&region.descriptors[fd], memory_order_relaxed);
        if (!what) continue;
        if (identity_of(fd) == what) raw(__NR_close, fd, 0, 0, 0);
        atomic_store(&region.descriptors[fd], 0);
    }
    raw(__NR_munmap, REGION_START, REGION_BYTES, 0, 0);
    for (int i = 0; i < MAX_STRAYS; i++) {
        if (region.strays[i].num_bytes) raw(__NR_munmap, region.strays[i].at, region.strays[i].num_bytes, 0, 0);
        region.strays[i].num_bytes = 0;
    }
    for (int i = 0; i < region.num_segments; i++) raw(__NR_shmctl, region.segments[i], IPC_RMID, 0, 0);
    region.num_segments = 0;
    atomic_store(&region.lock, 0); /* a thread may have left with it */
    for (int i = 1; i <= 64; i++) region.actions[i] = (Action){0, 0, 0, 0};
    return 0;
}
