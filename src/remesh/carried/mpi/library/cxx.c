/* What the C++ libraries of Open MPI and MPICH want of them besides MPI.
 *
 * mpic++ links every program with such a library (libmpi_cxx.so.40, libmpichcxx.so.12), also one that only calls C. The
 * program brings it along. Names, sizes and arguments are facts of its binary interface. In C++ an operation or an
 * error handler is two functions: the program's, and one of that library, which calls it.
 */
#include "core.h"

#if defined(FACE_MPICH) || defined(FACE_OPENMPI)

#include "attributes.h"
#include "datatype.h"
#include "errors.h"
#include "op.h"

/* ---- Operations ---- */

#if defined(FACE_OPENMPI)
/* `function` is the library's, `partner` the program's. */
static void call_in_cxx(const Op *op, void *in, void *inout, int count, Datatype *type) {
    typedef void Intercept(void *in, void *inout, int *count, MPI_Datatype *datatype, Callback *program);
    MPI_Datatype datatype = datatype_handle(type);
    ((Intercept *)(Callback *)op->function)(in, inout, &count, &datatype, op->partner);
}
#else
/* `function` is the program's, `partner` the library's. */
static void call_in_cxx(const Op *op, void *in, void *inout, int count, Datatype *type) {
    typedef void Call(const void *in, void *inout, int count, MPI_Datatype datatype, MPI_User_function *program);
    ((Call *)op->partner)(in, inout, count, datatype_handle(type), op->function);
}
#endif

static void speak_cxx(MPI_Op handle, Callback *partner) {
    Op *op = op_of(handle);
    if (op == NULL || op->object.is_predefined) die("MPI::Op::Init: the operation that was made for it is gone");
    op->partner = partner;
    op->call = call_in_cxx;
}

/* ---- Open MPI's ---- */

#if defined(FACE_OPENMPI)
EXPORTED void ompi_op_set_cxx_callback(MPI_Op op, Callback *program);
void ompi_op_set_cxx_callback(MPI_Op op, Callback *program) { speak_cxx(op, program); }

/* Error codes that Open MPI gives itself besides those of MPI: here are none. */
EXPORTED int ompi_errcode_intern_lastused;
EXPORTED char ompi_errcodes_intern[120];
int ompi_errcode_intern_lastused;
char ompi_errcodes_intern[120];

/* A list without entries: its head, at the third word, is followed and preceded by itself. */
EXPORTED void *ompi_registered_datareps[8];
void *ompi_registered_datareps[8] = {[4] = &ompi_registered_datareps[2], [5] = &ompi_registered_datareps[2]};

/* MPI::ERRORS_THROW_EXCEPTIONS. When MPI begins, the library writes a function that throws into it. */
enum { THROWING_FUNCTION = 88 };
EXPORTED char ompi_mpi_errors_throw_exceptions[1024];
char ompi_mpi_errors_throw_exceptions[1024] __attribute__((aligned(64)));

static void throw_exception(const Errhandler *handler, uintptr_t handle, int *code) {
    (void)handler;
    MPI_Comm comm = (MPI_Comm)handle;
    void (*throw)(MPI_Comm *comm, int *code, ...);
    memcpy(&throw, ompi_mpi_errors_throw_exceptions + THROWING_FUNCTION, sizeof throw);
    if (throw == NULL) die("MPI::ERRORS_THROW_EXCEPTIONS: %s; a program that does not call MPI::Init gets none", noted_words());
    throw(&comm, code);
}

void make_predefined_errhandlers_of_cxx(void) {
    uintptr_t handle = (uintptr_t)ompi_mpi_errors_throw_exceptions;
    Errhandler *throwing = make_predefined(KIND_ERRHANDLER, sizeof *throwing, handle);
    throwing->what = HANDLER_OF_PROGRAM;
    throwing->call = throw_exception;
}

EXPORTED int ompi_errhandler_invoke(void *handler, void *object, int kind, int code, const char *function);
int ompi_errhandler_invoke(void *handler, void *object, int kind, int code, const char *function) {
    (void)handler, (void)object, (void)kind;
    return end_call(fail(code, "told by its C++ library"), NULL, function);
}

/* The library writes into the error handler that it is given, so what would be returned is Open MPI's own structure. */
EXPORTED void *ompi_errhandler_create(int kind, void (*function)(void), int language);
void *ompi_errhandler_create(int kind, void (*function)(void), int language) {
    (void)kind, (void)function, (void)language;
    die("MPI::Create_errhandler: Remesh does not carry error handlers of Open MPI's C++ library; use "
        "MPI_Comm_create_errhandler");
}

EXPORTED int ompi_attr_create_keyval(void);
int ompi_attr_create_keyval(void) {
    die("MPI::Create_keyval: Remesh does not carry attributes of Open MPI's C++ library; use MPI_Comm_create_keyval");
}

/* ---- MPICH's ---- */

#else
EXPORTED void MPII_Op_set_cxx(MPI_Op op, Callback *call);
void MPII_Op_set_cxx(MPI_Op op, Callback *call) { speak_cxx(op, call); }

/* MPI::ERRORS_THROW_EXCEPTIONS: the library asks for the handler after each call, and throws by itself. */
enum { ERRORS_THROW_EXCEPTIONS = 0x54000002 };

void make_predefined_errhandlers_of_cxx(void) {
    Errhandler *throwing = make_predefined(KIND_ERRHANDLER, sizeof *throwing, ERRORS_THROW_EXCEPTIONS);
    throwing->what = HANDLER_RETURN;
}

/* How the library is told what an error handler belongs to. */
static int kind_in_cxx(ObjectKind kind) { return kind == KIND_COMM ? 0 : kind == KIND_FILE ? 1 : 2; }

static void call_handler_in_cxx(const Errhandler *handler, uintptr_t handle, int *code) {
    typedef void Call(int kind, int *handle, int *code, void (*program)(void));
    MPI_File file = (MPI_File)handle;
    int number = (int)handle;
    int *place = handler->holder == KIND_FILE ? (int *)&file : &number;
    ((Call *)handler->partner)(kind_in_cxx(handler->holder), place, code, handler->function);
}

EXPORTED void MPII_Errhandler_set_cxx(MPI_Errhandler errhandler, Callback *call);
void MPII_Errhandler_set_cxx(MPI_Errhandler errhandler, Callback *call) {
    Errhandler *handler = errhandler_of(errhandler);
    if (handler == NULL || handler->object.is_predefined) die("MPI::Create_errhandler: the error handler is gone");
    handler->partner = call;
    handler->call = call_handler_in_cxx;
}
#endif
#endif
