/* The three hot things of the channel between the halves of a rank: post and wait on shared words, the memory of
 * another process, and the address of a Python buffer. CPython's limited API (3.11), x86-64 and other Linux.
 *
 * Futexes are the shared kind: the words stand in a file that two processes map.
 */
#include "_records.h"
#include "_table.h"

#include <errno.h>
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/uio.h>

/* n arguments, all unsigned integers of up to 64 bits. */
static int take_integers(PyObject *const *args, Py_ssize_t given, Py_ssize_t wanted, uint64_t *out) {
    if (given != wanted) {
        PyErr_Format(PyExc_TypeError, "%zd arguments given, %zd expected", given, wanted);
        return -1;
    }
    for (Py_ssize_t i = 0; i < wanted; i++) {
        out[i] = PyLong_AsUnsignedLongLong(args[i]);
        if (out[i] == (uint64_t)-1 && PyErr_Occurred()) return -1;
    }
    return 0;
}

/* answer(request, reply, waiting): the reply stands in the slot; tell the caller. */
static PyObject *fast_answer(PyObject *self, PyObject *const *args, Py_ssize_t nargs) {
    uint64_t a[3];
    if (take_integers(args, nargs, 3, a)) return NULL;
    Word *reply = word_at(a[1]);
    atomic_store(reply, atomic_load_explicit(word_at(a[0]), memory_order_relaxed));
    if (atomic_load(word_at(a[2]))) futex_wake(reply);
    Py_RETURN_NONE;
}

/* pending(first_request, reply_offset, stride, count): bit i is set where slot i has a request without a reply. */
static PyObject *fast_pending(PyObject *self, PyObject *const *args, Py_ssize_t nargs) {
    uint64_t a[4], mask = 0;
    if (take_integers(args, nargs, 4, a)) return NULL;
    for (uint64_t i = 0; i < a[3]; i++) {
        uint64_t slot = a[0] + i * a[2];
        uint32_t reply = atomic_load_explicit(word_at(slot + a[1]), memory_order_relaxed);
        if (atomic_load_explicit(word_at(slot), memory_order_acquire) != reply) mask |= (uint64_t)1 << i;
    }
    return PyLong_FromUnsignedLongLong(mask);
}

/* spin(turns): turn as somebody does who waits for a word. */
static PyObject *fast_spin(PyObject *self, PyObject *const *args, Py_ssize_t nargs) {
    uint64_t a[1];
    Word word = 0;
    if (take_integers(args, nargs, 1, a)) return NULL;
    while (a[0]-- && atomic_load_explicit(&word, memory_order_acquire) == 0) relax();
    Py_RETURN_NONE;
}

/* close_gate(word), open_gate(word): let no thread of the program into a file, or let them in again. */
static PyObject *fast_close_gate(PyObject *self, PyObject *const *args, Py_ssize_t nargs) {
    uint64_t a[1];
    if (take_integers(args, nargs, 1, a)) return NULL;
    atomic_fetch_or(word_at(a[0]), GATE_CLOSED);
    Py_RETURN_NONE;
}

static PyObject *fast_open_gate(PyObject *self, PyObject *const *args, Py_ssize_t nargs) {
    uint64_t a[1];
    if (take_integers(args, nargs, 1, a)) return NULL;
    atomic_fetch_and(word_at(a[0]), ~(uint32_t)GATE_CLOSED);
    Py_RETURN_NONE;
}

/* The kernel moves at most 2 GiB a call, and fewer where pages are missing: go on until all is there. 0 or an errno. */
static int move_memory(long number, uint64_t pid, uint64_t there, uint64_t here, uint64_t num_bytes) {
    uint64_t done = 0;
    while (done < num_bytes) {
        uint64_t step = num_bytes - done < (1u << 30) ? num_bytes - done : (1u << 30);
        struct iovec local = {(void *)(uintptr_t)(here + done), step};
        struct iovec remote = {(void *)(uintptr_t)(there + done), step};
        long moved = syscall(number, (pid_t)pid, &local, 1UL, &remote, 1UL, 0UL);
        if (moved < 0 && errno == EINTR) continue;
        if (moved <= 0) return moved < 0 ? errno : EFAULT;
        done += (uint64_t)moved;
    }
    return 0;
}

static PyObject *copy_memory(PyObject *const *args, Py_ssize_t nargs, long number) {
    uint64_t a[4]; /* pid, remote address, local address, bytes */
    if (take_integers(args, nargs, 4, a)) return NULL;
    int error = 0;
    Py_BEGIN_ALLOW_THREADS;
    error = move_memory(number, a[0], a[1], a[2], a[3]);
    Py_END_ALLOW_THREADS;
    if (error) {
        errno = error;
        return PyErr_SetFromErrno(PyExc_OSError);
    }
    Py_RETURN_NONE;
}

static PyObject *fast_read_memory(PyObject *self, PyObject *const *args, Py_ssize_t nargs) {
    return copy_memory(args, nargs, SYS_process_vm_readv);
}

static PyObject *fast_write_memory(PyObject *self, PyObject *const *args, Py_ssize_t nargs) {
    return copy_memory(args, nargs, SYS_process_vm_writev);
}

/* address_of(buffer): where the bytes of a contiguous buffer stand. The caller keeps the buffer alive. */
static PyObject *fast_address_of(PyObject *self, PyObject *buffer) {
    Py_buffer view;
    if (PyObject_GetBuffer(buffer, &view, PyBUF_ANY_CONTIGUOUS)) return NULL;
    PyObject *address = PyLong_FromVoidPtr(view.buf);
    PyBuffer_Release(&view);
    return address;
}

/* map_file(path, bytes): a writable memoryview on a shared mapping of the file; no descriptor stays open. */
static PyObject *fast_map_file(PyObject *self, PyObject *args) {
    PyObject *path;
    unsigned long long num_bytes;
    if (!PyArg_ParseTuple(args, "O&K", PyUnicode_FSConverter, &path, &num_bytes)) return NULL;
    int descriptor = open(PyBytes_AsString(path), O_RDWR | O_CLOEXEC);
    Py_DECREF(path);
    if (descriptor < 0) return PyErr_SetFromErrno(PyExc_OSError);
    struct stat status;
    void *start = MAP_FAILED;
    if (fstat(descriptor, &status) == 0) {
        errno = EINVAL; /* a shorter file would end this process by SIGBUS later */
        if ((unsigned long long)status.st_size >= num_bytes)
            start = mmap(NULL, num_bytes, PROT_READ | PROT_WRITE, MAP_SHARED, descriptor, 0);
    }
    int error = errno;
    close(descriptor);
    if (start == MAP_FAILED) {
        errno = error;
        return PyErr_SetFromErrno(PyExc_OSError);
    }
    return PyMemoryView_FromMemory(start, (Py_ssize_t)num_bytes, PyBUF_WRITE);
}

/* map_at(path, address, bytes): map a file shared and writable at that address, which must be free. */
static PyObject *fast_map_at(PyObject *self, PyObject *args) {
    PyObject *path;
    unsigned long long start, num_bytes;
    if (!PyArg_ParseTuple(args, "O&KK", PyUnicode_FSConverter, &path, &start, &num_bytes)) return NULL;
    int descriptor = open(PyBytes_AsString(path), O_RDWR | O_CLOEXEC);
    Py_DECREF(path);
    if (descriptor < 0) return PyErr_SetFromErrno(PyExc_OSError);
    int flags = MAP_SHARED | MAP_NORESERVE | MAP_FIXED_NOREPLACE;
    void *wanted = (void *)(uintptr_t)start, *at = mmap(wanted, num_bytes, PROT_READ | PROT_WRITE, flags, descriptor, 0);
    int error = errno;
    close(descriptor);
    if (at != MAP_FAILED && at != wanted) {
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

static PyMethodDef methods[] = {
    {"answer", (PyCFunction)(void (*)(void))fast_answer, METH_FASTCALL, NULL},
    {"pending", (PyCFunction)(void (*)(void))fast_pending, METH_FASTCALL, NULL},
    {"spin", (PyCFunction)(void (*)(void))fast_spin, METH_FASTCALL, NULL},
    {"close_gate", (PyCFunction)(void (*)(void))fast_close_gate, METH_FASTCALL, NULL},
    {"open_gate", (PyCFunction)(void (*)(void))fast_open_gate, METH_FASTCALL, NULL},
    {"read_memory", (PyCFunction)(void (*)(void))fast_read_memory, METH_FASTCALL, NULL},
    {"write_memory", (PyCFunction)(void (*)(void))fast_write_memory, METH_FASTCALL, NULL},
    {"address_of", fast_address_of, METH_O, NULL},
    {"map_file", fast_map_file, METH_VARARGS, NULL},
    {"map_at", fast_map_at, METH_VARARGS, NULL},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef definition = {
    PyModuleDef_HEAD_INIT, "_fast", "The hot paths of both halves of a rank.", -1, methods,
    NULL, NULL, NULL, NULL,
};

PyMODINIT_FUNC PyInit__fast(void) {
    PyObject *module = PyModule_Create(&definition);
    if (module == NULL) return NULL;
    if (add_table(module) || add_records(module) || add_engine(module)) Py_CLEAR(module);
    return module;
}
