/* Start, end, time, names and versions. */
#include "environment.h"

#include <sys/mman.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include "channel.h"
#include "comm.h"
#include "datatype.h"
#include "entry.h"
#include "errors.h"
#include "group.h"
#include "info.h"
#include "op.h"
#include "request.h"

Process process;
atomic_int num_sessions;
static int thread_level = MPI_THREAD_SINGLE;
static pthread_t main_thread;
static pthread_mutex_t starting = PTHREAD_MUTEX_INITIALIZER;
static bool has_world;
static bool is_over; /* as the lower half has been told */

/* A program may ask for handles, and use some objects, before it starts MPI. */
__attribute__((constructor)) static void make_predefined_objects(void) {
    pthread_mutexattr_t recursive;
    pthread_mutexattr_init(&recursive);
    pthread_mutexattr_settype(&recursive, PTHREAD_MUTEX_RECURSIVE);
    pthread_mutex_init(&process.guard, &recursive);
    make_predefined_errhandlers();
    make_predefined_infos();
    make_predefined_groups();
    make_predefined_datatypes();
    make_predefined_ops();
    make_predefined_comms();
    make_predefined_requests();
}

int start_process(void) {
    int error = MPI_SUCCESS;
    pthread_mutex_lock(&starting);
    if (!has_world) {
        if (!channel_is_there()) die("starting MPI: this process was not started by `remesh mpi run`");
        error = lower_hello(&process.rank, &process.size);
        if (!error) error = begin_comms();
        has_world = !error;
    } else if (is_over) {
        /* Sessions may begin again when the last one has ended, and so may MPI_Init. */
        error = tell_of_self();
        is_over = error;
    }
    pthread_mutex_unlock(&starting);
    return error;
}

int end_process(void) {
    pthread_mutex_lock(&starting);
    is_over = true;
    int error = lower_finish();
    pthread_mutex_unlock(&starting);
    return error;
}

bool is_running(void) {
    return (process.is_started && !process.is_ended) || atomic_load_explicit(&num_sessions, memory_order_relaxed) > 0;
}

int not_running(const char *function) {
    const char *when = process.is_ended ? "after MPI_Finalize" : "before MPI_Init";
    return end_call(fail(MPI_ERR_OTHER, "it was called %s", when), NULL, function);
}

static int start(int required) {
    if (process.is_started) return fail(MPI_ERR_OTHER, "MPI has been started already");
    TRY(start_process());
    thread_level = required;
    main_thread = pthread_self();
    process.is_started = true;
    return MPI_SUCCESS;
}

int do_Init(int *argc, char ***argv) {
    (void)argc, (void)argv;
    return start(MPI_THREAD_SINGLE);
}

int do_Init_thread(int *argc, char ***argv, int required, int *provided) {
    (void)argc, (void)argv;
    if (required < MPI_THREAD_SINGLE || required > MPI_THREAD_MULTIPLE)
        return fail(MPI_ERR_ARG, "%d is no level of thread support", required);
    if (provided) *provided = required;
    return start(required);
}

int do_Finalize(void) {
    if (!process.is_started || process.is_ended)
        return fail(MPI_ERR_OTHER, process.is_ended ? "MPI is over already" : "MPI was not started");
    TRY(end_comms());
    TRY(finish_buffered());
    process.is_ended = true;
    return end_process();
}

int do_Initialized(int *flag) {
    *flag = process.is_started;
    return MPI_SUCCESS;
}

int do_Finalized(int *flag) {
    *flag = process.is_ended;
    return MPI_SUCCESS;
}

int do_Query_thread(int *provided) {
    *provided = thread_level;
    return MPI_SUCCESS;
}

int do_Is_thread_main(int *flag) {
    *flag = pthread_equal(main_thread, pthread_self()) != 0;
    return MPI_SUCCESS;
}

int do_Abort(Comm *comm, int errorcode) {
    (void)comm;
    fflush(NULL);
    /* The lower half ends the job, this process included. */
    TRY(lower_abort(errorcode));
    _exit(errorcode ? errorcode : 1);
}

/* ---- time ---- */

double do_Wtime(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (double)now.tv_sec + 1e-9 * (double)now.tv_nsec;
}

double do_Wtick(void) { return 1e-9; }

/* ---- names and versions ---- */

int do_Get_processor_name(char *name, int *resultlen) {
    /* Asked anew each time: a restart may change it. */
    TRY(lower_describe("processor_name", name, MPI_MAX_PROCESSOR_NAME));
    *resultlen = (int)strlen(name);
    return MPI_SUCCESS;
}

int do_Get_library_version(char *version, int *resultlen) {
    if (channel_is_there()) TRY(lower_describe("library_version", version, MPI_MAX_LIBRARY_VERSION_STRING));
    else snprintf(version, MPI_MAX_LIBRARY_VERSION_STRING, "Remesh");
    *resultlen = (int)strlen(version);
    return MPI_SUCCESS;
}

int do_Get_version(int *version, int *subversion) {
    *version = MPI_VERSION;
    *subversion = MPI_SUBVERSION;
    return MPI_SUCCESS;
}

int do_Get_hw_resource_info(Info **hw_info) {
    *hw_info = copy_info(NULL);
    return MPI_SUCCESS;
}

/* ---- the binary interface; source: MPI 5.0, chapter 20 ---- */

int do_Abi_get_version(int *abi_major, int *abi_minor) {
#if defined(FACE_ABI)
    *abi_major = MPI_ABI_VERSION, *abi_minor = MPI_ABI_SUBVERSION;
#else
    *abi_major = *abi_minor = -1;
#endif
    return MPI_SUCCESS;
}

static void put_size(Info *info, const char *key, size_t size) {
    char text[16];
    snprintf(text, sizeof text, "%zu", size);
    put_info(info, key, text);
}

int do_Abi_get_info(Info **info) {
    *info = copy_info(NULL);
    put_size(*info, "mpi_aint_size", sizeof(MPI_Aint));
    put_size(*info, "mpi_count_size", sizeof(MPI_Count));
    put_size(*info, "mpi_offset_size", sizeof(MPI_Offset));
    return MPI_SUCCESS;
}

#define HAS(name) {name, true}
#define HAS_NOT(name) {name, false}
static const struct {
    const char *name;
    bool is_supported;
} fortran_types[] = {
    HAS("logical1"), HAS("logical2"), HAS("logical4"), HAS("logical8"), HAS("integer1"), HAS("integer2"), HAS("integer4"),
    HAS("integer8"), HAS("real4"), HAS("real8"), HAS("real16"), HAS("complex8"), HAS("complex16"), HAS("complex32"),
    HAS("double_complex"),
#ifdef MPI_LOGICAL16
    HAS("logical16"),
#else
    HAS_NOT("logical16"),
#endif
#ifdef MPI_INTEGER16
    HAS("integer16"),
#else
    HAS_NOT("integer16"),
#endif
#ifdef MPI_REAL2
    HAS("real2"), HAS("complex4"),
#else
    HAS_NOT("real2"), HAS_NOT("complex4"),
#endif
};

int do_Abi_get_fortran_info(Info **info) {
    *info = copy_info(NULL);
    put_size(*info, "mpi_logical_size", sizeof(MPI_Fint));
    put_size(*info, "mpi_integer_size", sizeof(MPI_Fint));
    put_size(*info, "mpi_real_size", sizeof(float));
    put_size(*info, "mpi_double_precision_size", sizeof(double));
    for (size_t i = 0; i < sizeof fortran_types / sizeof *fortran_types; i++) {
        char key[64];
        snprintf(key, sizeof key, "mpi_%s_supported", fortran_types[i].name);
        put_info(*info, key, fortran_types[i].is_supported ? "true" : "false");
    }
    return MPI_SUCCESS;
}

int do_Abi_get_fortran_booleans(int logical_size, void *logical_true, void *logical_false, int *is_set) {
    if (logical_size > 0 && logical_size <= 16) {
        memset(logical_true, 0, (size_t)logical_size);
        memset(logical_false, 0, (size_t)logical_size);
        *(char *)logical_true = 1;
    }
    *is_set = 1;
    return MPI_SUCCESS;
}

/* ---- memory ---- */

int do_Alloc_mem(MPI_Aint size, Info *info, void *baseptr) {
    (void)info;
    void *memory = NULL;
    if (size < 0) return fail(MPI_ERR_ARG, "allocating %ld bytes, expected 0 or more", (long)size);
    if (posix_memalign(&memory, 64, size ? (size_t)size : 1)) return fail(MPI_ERR_NO_MEM, "allocating %ld bytes", (long)size);
    memcpy(baseptr, &memory, sizeof memory);
    return MPI_SUCCESS;
}

int do_Free_mem(void *base) {
    free(base);
    return MPI_SUCCESS;
}
