/* Memory that both halves of a rank have under the same addresses, and NumPy's large arrays in it.
 *
 * The arena is a file, mapped shared at a fixed address by both halves, so that the lower half hands the program's
 * arrays to MPI where they are. Here it is divided into extents, in order of address, that fill it without a gap:
 *
 *     used    holds an array
 *     warm    free, its pages are there with anything in them: the next array pays no page faults
 *     cold    free, no pages
 *
 * All pages of an array are made when it is made: a file system that is full is then noticed, and the array goes where
 * NumPy puts it otherwise; later it would end the process (SIGBUS). Small arrays go there always.
 *
 * A process made by fork must not write into its parent's arrays: it gets a copy of them in the same place, of its own.
 */
#include "_fast.h"

#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/stat.h>

#ifndef MADV_POPULATE_WRITE
#define MADV_POPULATE_WRITE 23
#endif
#ifndef MADV_COLLAPSE
#define MADV_COLLAPSE 25
#endif

enum { PAGE = 4096, HUGE_PAGE = 1 << 21, LEAST_BYTES = 65536 };
#define MOST_WARM_BYTES ((uint64_t)64 << 20)
enum { GET_HANDLER = 305, SET_HANDLER = 304 }; /* of NumPy's table of functions, from 1.22 on */

typedef enum { COLD, WARM, USED } State;
typedef struct {
    uint64_t start, num_bytes;
    State state;
} Extent;

/* numpy/ndarraytypes.h: PyDataMem_Handler, version 1 (NEP 49). */
typedef struct {
    char name[127];
    uint8_t version;
    void *ctx;
    void *(*malloc)(void *ctx, size_t size);
    void *(*calloc)(void *ctx, size_t count, size_t size);
    void *(*realloc)(void *ctx, void *at, size_t size);
    void (*free)(void *ctx, void *at, size_t size);
} Handler;

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static uint64_t arena_start, arena_bytes, warm_bytes, used_bytes;
static Extent *extents;
static size_t num_extents, room_extents;
static const Handler *plain;
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
        Extent *larger = realloc(extents, 2 * room_extents * sizeof *extents);
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

/* ---- the handler ---- */

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

static void *shared_malloc(void *ctx, size_t size) {
    (void)ctx;
    void *start = take(size, 0);
    return start != NULL ? start : plain->malloc(plain->ctx, size);
}

static void *shared_calloc(void *ctx, size_t count, size_t size) {
    (void)ctx;
    size_t whole;
    void *start = __builtin_mul_overflow(count, size, &whole) ? NULL : take(whole, 1);
    return start != NULL ? start : plain->calloc(plain->ctx, count, size);
}

static void shared_free(void *ctx, void *at, size_t size) {
    (void)ctx;
    if (is_ours(at)) give(at);
    else plain->free(plain->ctx, at, size);
}

static void *shared_realloc(void *ctx, void *at, size_t size) {
    if (!is_ours(at)) return plain->realloc(plain->ctx, at, size);
    pthread_mutex_lock(&lock);
    uint64_t room = extents[find_extent((uint64_t)(uintptr_t)at)].num_bytes;
    pthread_mutex_unlock(&lock);
    if (size <= room && size >= room / 2) return at;
    void *moved = shared_malloc(ctx, size);
    if (moved == NULL) return NULL;
    memcpy(moved, at, size < room ? size : room);
    give(at);
    return moved;
}

static Handler shared = {"remesh_shared", 1, NULL, shared_malloc, shared_calloc, shared_realloc, shared_free};

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

/* ---- Python's side ---- */

/* map_at(path, address, bytes): map a file shared and writable at that address, which must be free. */
static PyObject *arena_map_at(PyObject *self, PyObject *args) {
    PyObject *path;
    unsigned long long start, num_bytes;
    (void)self;
    if (!PyArg_ParseTuple(args, "O&KK", PyUnicode_FSConverter, &path, &start, &num_bytes)) return NULL;
    int descriptor = open(PyBytes_AsString(path), O_RDWR | O_CLOEXEC);
    Py_DECREF(path);
    if (descriptor < 0) return PyErr_SetFromErrno(PyExc_OSError);
    int flags = MAP_SHARED | MAP_NORESERVE | MAP_FIXED_NOREPLACE;
    void *at = mmap(address(start), num_bytes, PROT_READ | PROT_WRITE, flags, descriptor, 0);
    int error = errno;
    close(descriptor);
    if (at != MAP_FAILED && at != address(start)) {
        /* A kernel that does not know the flag took the address for a wish. */
        munmap(at, num_bytes);
        at = MAP_FAILED;
        error = EEXIST;
    }
    if (at == MAP_FAILED) {
        errno = error;
        return PyErr_SetFromErrno(PyExc_OSError);
    }
    Py_RETURN_NONE;
}

/* share_arrays(numpy_api, address, bytes): from now on NumPy puts large arrays of this thread into the arena there. */
static PyObject *arena_share(PyObject *self, PyObject *args) {
    PyObject *capsule;
    unsigned long long start, num_bytes;
    (void)self;
    if (!PyArg_ParseTuple(args, "OKK", &capsule, &start, &num_bytes)) return NULL;
    if (plain != NULL) return PyErr_SetString(PyExc_RuntimeError, "arrays are shared already"), NULL;
    void **api = PyCapsule_GetPointer(capsule, NULL);
    if (api == NULL) return NULL;
    PyObject *before = ((PyObject * (*)(void)) api[GET_HANDLER])();
    const Handler *handler = before == NULL ? NULL : PyCapsule_GetPointer(before, "mem_handler");
    PyObject *ours = handler == NULL ? NULL : PyCapsule_New(&shared, "mem_handler", NULL);
    room_extents = 64;
    if (ours != NULL && (extents = malloc(room_extents * sizeof *extents)) == NULL) PyErr_NoMemory();
    if (ours == NULL || extents == NULL) return NULL;
    extents[0] = (Extent){start, num_bytes, COLD};
    num_extents = 1;
    arena_start = start;
    arena_bytes = num_bytes;
    plain = handler; /* its capsule stays alive: `before` is kept */
    pthread_atfork(before_fork, in_parent, in_child);
    PyObject *old = ((PyObject * (*)(PyObject *)) api[SET_HANDLER])(ours);
    Py_DECREF(ours);
    if (old == NULL) return NULL;
    Py_DECREF(old);
    Py_RETURN_NONE;
}

/* shared_bytes(): bytes that hold arrays, and that are kept for the next. */
static PyObject *arena_bytes_of(PyObject *self, PyObject *ignored) {
    (void)self, (void)ignored;
    return Py_BuildValue("(KK)", (unsigned long long)used_bytes, (unsigned long long)warm_bytes);
}

static PyMethodDef arena_methods[] = {
    {"map_at", arena_map_at, METH_VARARGS, NULL},
    {"share_arrays", arena_share, METH_VARARGS, NULL},
    {"shared_bytes", arena_bytes_of, METH_NOARGS, NULL},
    {NULL, NULL, 0, NULL},
};

int add_arena(PyObject *module) { return PyModule_AddFunctions(module, arena_methods); }
