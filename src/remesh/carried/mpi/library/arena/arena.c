/* Memory that both halves of a rank have under the same addresses, and the program's large blocks in it.
 *
 * This library stands in the place of malloc where that is asked for (LD_PRELOAD; faces.py). The arena is a file, mapped
 * shared at a fixed address by both halves, so that the lower half hands the program's blocks to MPI where they are. It is
 * divided into extents, in order of address, that fill it without a gap:
 *
 *     used    holds a block
 *     warm    free, its pages are there with anything in them: the next block pays no page faults
 *     cold    free, no pages
 *
 * All pages of a block are made when it is made: a file system that is full is then noticed, and the block goes where libc
 * puts it; later it would end the process (SIGBUS). Small blocks go there always.
 *
 * A process made by fork must not write into its parent's blocks: it gets a copy of them in the same place, of its own.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <dlfcn.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include "../../_calls.h"

#ifndef MADV_POPULATE_WRITE
#define MADV_POPULATE_WRITE 23
#endif
#ifndef MADV_COLLAPSE
#define MADV_COLLAPSE 25
#endif

enum { PAGE = 4096, HUGE_PAGE = 1 << 21, LEAST_BYTES = 65536 };
#define MOST_WARM_BYTES ((uint64_t)64 << 20)

typedef enum { COLD, WARM, USED } State;
typedef struct {
    uint64_t start, num_bytes;
    State state;
} Extent;

/* What libc has under names of its own, too. */
void *__libc_malloc(size_t size);
void *__libc_calloc(size_t count, size_t size);
void *__libc_realloc(void *at, size_t size);
void *__libc_memalign(size_t alignment, size_t size);
void __libc_free(void *at);

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static uint64_t arena_start, arena_bytes, warm_bytes, used_bytes;
static Extent *extents;
static size_t num_extents, room_extents;
static int is_copy; /* in a child: its arena is no file, but memory of its own */

static int is_ours(const void *at) { return (uint64_t)(uintptr_t)at - arena_start < arena_bytes; }

static void *address(uint64_t start) { return (void *)(uintptr_t)start; }

/* ---- extents; the lock is held ---- */

static size_t find_extent(uint64_t start) {
    size_t low = 0, high = num_extents;
    while (high - low > 1) {
        size_t middle = (low + high) / 2;
        if (extents[middle].start <= start) low = middle;
        else high = middle;
    }
    return low;
}

/* Change the state of an extent, and join it with free neighbours of the same state. */
static void set_state(size_t at, State state) {
    uint64_t num_bytes = extents[at].num_bytes;
    if (extents[at].state == WARM) warm_bytes -= num_bytes;
    if (extents[at].state == USED) used_bytes -= num_bytes;
    if (state == WARM) warm_bytes += num_bytes;
    if (state == USED) used_bytes += num_bytes;
    extents[at].state = state;
    if (state == USED) return;
    size_t first = at, last = at;
    if (first > 0 && extents[first - 1].state == state) first--;
    if (last + 1 < num_extents && extents[last + 1].state == state) last++;
    for (size_t i = first + 1; i <= last; i++) extents[first].num_bytes += extents[i].num_bytes;
    memmove(extents + first + 1, extents + last + 1, (num_extents - last - 1) * sizeof *extents);
    num_extents -= last - first;
}

/* Cut an extent after so many bytes; whether there was memory to note it. */
static int split(size_t at, uint64_t num_bytes) {
    if (extents[at].num_bytes == num_bytes) return 1;
    if (num_extents == room_extents) {
        Extent *larger = __libc_realloc(extents, 2 * room_extents * sizeof *extents);
        if (larger == NULL) return 0;
        extents = larger;
        room_extents *= 2;
    }
    memmove(extents + at + 1, extents + at, (num_extents - at) * sizeof *extents);
    num_extents++;
    extents[at].num_bytes = num_bytes;
    extents[at + 1].start += num_bytes;
    extents[at + 1].num_bytes -= num_bytes;
    return 1;
}

/* Whether they are gone, so that zeros come in their place: not on every file system can a file have holes. */
static int drop_pages(size_t at) {
    return madvise(address(extents[at].start), extents[at].num_bytes, is_copy ? MADV_DONTNEED : MADV_REMOVE) == 0;
}

/* Make all pages, of as many huge ones as the kernel lets us: who copies an array finds it three times as fast. */
static int make_pages(char *start, uint64_t num_bytes) {
    if (madvise(start, num_bytes, MADV_POPULATE_WRITE)) return 0;
    uint64_t huge_bytes = num_bytes & ~(uint64_t)(HUGE_PAGE - 1);
    if (huge_bytes) madvise(start, huge_bytes, MADV_COLLAPSE);
    return 1;
}

static void *take_as(State state, uint64_t num_bytes) {
    uint64_t unit = num_bytes >= HUGE_PAGE ? HUGE_PAGE : PAGE;
    for (size_t i = 0; i < num_extents; i++) {
        uint64_t skipped = -extents[i].start & (unit - 1);
        if (extents[i].state != state || extents[i].num_bytes < num_bytes + skipped) continue;
        if (skipped && !split(i++, skipped)) return NULL;
        if (!split(i, num_bytes)) return NULL;
        /* It was split off a free one of the same state: counted there until now. */
        void *start = address(extents[i].start);
        if (state == COLD && !make_pages(start, num_bytes)) {
            /* Those that were made hold nothing yet. */
            drop_pages(i);
            set_state(i, COLD);
            return NULL;
        }
        set_state(i, USED);
        return start;
    }
    return NULL;
}

/* Have a whole huge page at hand for arrays that are smaller; whether it is. */
static int warm_block(void) {
    if (warm_bytes + HUGE_PAGE > MOST_WARM_BYTES) return 0;
    char *start = take_as(COLD, HUGE_PAGE);
    if (start == NULL) return 0;
    set_state(find_extent((uint64_t)(uintptr_t)start), WARM);
    return 1;
}

/* ---- blocks ---- */

static void *take(size_t size, int zeroed) {
    if (size < LEAST_BYTES || size > arena_bytes) return NULL;
    uint64_t num_bytes = ((uint64_t)size + PAGE - 1) & ~(uint64_t)(PAGE - 1);
    pthread_mutex_lock(&lock);
    void *start = take_as(WARM, num_bytes);
    if (start == NULL && num_bytes < HUGE_PAGE && warm_block()) start = take_as(WARM, num_bytes);
    int is_stale = start != NULL;
    if (start == NULL) start = take_as(COLD, num_bytes);
    pthread_mutex_unlock(&lock);
    if (is_stale && zeroed) memset(start, 0, size);
    return start;
}

static void give(void *at) {
    pthread_mutex_lock(&lock);
    size_t found = find_extent((uint64_t)(uintptr_t)at);
    int is_cold = warm_bytes + extents[found].num_bytes > MOST_WARM_BYTES && drop_pages(found);
    set_state(found, is_cold ? COLD : WARM);
    pthread_mutex_unlock(&lock);
}

static uint64_t room_of(const void *at) {
    pthread_mutex_lock(&lock);
    uint64_t room = extents[find_extent((uint64_t)(uintptr_t)at)].num_bytes;
    pthread_mutex_unlock(&lock);
    return room;
}

/* ---- in the place of libc's ---- */

void *malloc(size_t size) {
    void *start = take(size, 0);
    return start ? start : __libc_malloc(size);
}

void *calloc(size_t count, size_t size) {
    size_t whole;
    void *start = __builtin_mul_overflow(count, size, &whole) ? NULL : take(whole, 1);
    return start ? start : __libc_calloc(count, size);
}

void free(void *at) {
    if (is_ours(at)) give(at);
    else __libc_free(at);
}

void *realloc(void *at, size_t size) {
    if (at == NULL) return malloc(size);
    if (!is_ours(at)) return __libc_realloc(at, size);
    if (size == 0) return free(at), NULL;
    uint64_t room = room_of(at);
    if (size <= room && size >= room / 2) return at;
    void *moved = malloc(size);
    if (moved == NULL) return NULL;
    memcpy(moved, at, size < room ? size : room);
    give(at);
    return moved;
}

void *memalign(size_t alignment, size_t size) {
    void *start = alignment <= PAGE ? take(size, 0) : NULL;
    return start ? start : __libc_memalign(alignment, size);
}

void *aligned_alloc(size_t alignment, size_t size) { return memalign(alignment, size); }

int posix_memalign(void **at, size_t alignment, size_t size) {
    if (alignment % sizeof(void *) || alignment == 0 || (alignment & (alignment - 1))) return EINVAL;
    void *start = memalign(alignment, size);
    if (start == NULL) return ENOMEM;
    *at = start;
    return 0;
}

void *valloc(size_t size) { return memalign(PAGE, size); }

size_t malloc_usable_size(void *at) {
    static size_t (*plain)(void *);
    if (is_ours(at)) return room_of(at);
    if (plain == NULL) plain = (size_t (*)(void *))dlsym(RTLD_NEXT, "malloc_usable_size");
    return plain(at);
}

/* ---- fork ---- */

static char *copy;
static uint64_t copy_bytes;

static void before_fork(void) {
    pthread_mutex_lock(&lock);
    copy_bytes = used_bytes;
    if (copy_bytes == 0) return;
    copy = mmap(NULL, copy_bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (copy == MAP_FAILED) return;
    char *to = copy;
    for (size_t i = 0; i < num_extents; i++) {
        if (extents[i].state != USED) continue;
        memcpy(to, address(extents[i].start), extents[i].num_bytes);
        to += extents[i].num_bytes;
    }
}

static void in_parent(void) {
    if (copy_bytes && copy != MAP_FAILED) munmap(copy, copy_bytes);
    pthread_mutex_unlock(&lock);
}

static void in_child(void) {
    /* Without memory for the copy the child must not see the parent's arrays: touching one ends it. */
    int access = copy_bytes && copy == MAP_FAILED ? PROT_NONE : PROT_READ | PROT_WRITE;
    int flags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED;
    is_copy = 1;
    mmap(address(arena_start), arena_bytes, access, flags, -1, 0);
    char *from = copy;
    for (size_t i = 0; copy_bytes && copy != MAP_FAILED && i < num_extents; i++) {
        if (extents[i].state != USED) continue;
        uint64_t num_bytes = extents[i].num_bytes;
        mremap(from, num_bytes, num_bytes, MREMAP_MAYMOVE | MREMAP_FIXED, address(extents[i].start));
        from += num_bytes;
    }
    pthread_mutex_unlock(&lock);
}

/* ---- start ---- */

/* Opens the arena beside the channel; without one, all blocks go where libc puts them. */
__attribute__((constructor)) static void open_arena(void) {
    char path[4096];
    const char *channel = getenv("REMESH_CHANNEL");
    const char *slash = channel ? strrchr(channel, '/') : NULL;
    if (slash) snprintf(path, sizeof path, "%.*s/arena", (int)(slash - channel), channel);
    else snprintf(path, sizeof path, "/tmp/.remesh/arena");
    int descriptor = open(path, O_RDWR | O_CLOEXEC);
    if (descriptor < 0) return;
    struct stat status;
    int flags = MAP_SHARED | MAP_NORESERVE | MAP_FIXED_NOREPLACE;
    void *at = MAP_FAILED;
    if (fstat(descriptor, &status) == 0)
        at = mmap(address(ARENA_START), (size_t)status.st_size, PROT_READ | PROT_WRITE, flags, descriptor, 0);
    close(descriptor);
    room_extents = 64;
    extents = at == address(ARENA_START) ? __libc_malloc(room_extents * sizeof *extents) : NULL;
    if (extents == NULL) return;
    extents[0] = (Extent){ARENA_START, (uint64_t)status.st_size, COLD};
    num_extents = 1;
    pthread_atfork(before_fork, in_parent, in_child);
    arena_start = ARENA_START;
    arena_bytes = (uint64_t)status.st_size;
}

/* Bytes that hold blocks, and that are kept for the next: for tests. */
void remesh_arena_bytes(uint64_t told[2]) {
    told[0] = used_bytes;
    told[1] = warm_bytes;
}
