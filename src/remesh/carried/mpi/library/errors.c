/* What becomes of an error: words that are noted where it is met, the handler that gets it, and codes of the program's.
 *
 * A code is an error class, MPI's or one that the program has added, or a code that it has added to a class. The words
 * belong to the last error of the thread; MPI_Error_string tells them with the class.
 */
#include "errors.h"

#include <unistd.h>

#include "channel.h"
#include "classes.h"
#include "comm.h"
#include "entry.h"

enum { MAX_WORDS = 512 };
static _Thread_local char words[MAX_WORDS];
static _Thread_local int class_of_words;
static _Thread_local Object *blamed;

int fail(int error_class, const char *format, ...) {
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(words, sizeof words, format, arguments);
    va_end(arguments);
    class_of_words = error_class;
    return error_class;
}

int fail_on(void *object, int error_class, const char *format, ...) {
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(words, sizeof words, format, arguments);
    va_end(arguments);
    class_of_words = error_class;
    Object *chosen = object;
    /* The handler of one that is freed would get a handle that is none. */
    blamed = chosen && !chosen->is_freed ? chosen : NULL;
    return error_class;
}

const char *noted_words(void) { return words; }

void die(const char *format, ...) {
    static atomic_flag dies = ATOMIC_FLAG_INIT;
    /* Who comes here in the middle of the call below, or at the same time, has nothing to add. */
    if (atomic_flag_test_and_set(&dies)) _exit(1);
    va_list arguments;
    va_start(arguments, format);
    flockfile(stderr);
    fprintf(stderr, "remesh: rank %d: ", process.rank);
    vfprintf(stderr, format, arguments);
    fputc('\n', stderr);
    fflush(NULL);
    funlockfile(stderr);
    va_end(arguments);
    /* An answer would mean that the job goes on: there is none, and the lower half ends this process. Who has no channel
     * yet does not open it here: it may be what cannot be opened.
     */
    if (channel_is_open()) lower_abort(1);
    _exit(1);
}

void *must_have(void *memory) {
    if (memory == NULL) die("out of memory");
    return memory;
}

int class_of_lower(int number) {
    return number >= 0 && number < NUM_LOWER_CLASSES ? lower_classes[number] : MPI_ERR_OTHER;
}

/* ---- classes and codes of the program ---- */

typedef struct {
    int error_class; /* its own code where it is a class */
    bool is_class, is_removed;
    char *text;
} Added;
static Added *added;
static int num_added;

int last_used_code(void) { return MPI_ERR_LASTCODE + num_added; }

static Added *find_added(int code) {
    int index = code - MPI_ERR_LASTCODE - 1;
    return index >= 0 && index < num_added && !added[index].is_removed ? &added[index] : NULL;
}

static int add(int error_class, bool is_class, int *code) {
    LOCKED {
        /* A program that adds and removes codes all the time gets the same ones again. */
        int place = 0;
        while (place < num_added && !added[place].is_removed) place++;
        if (place == num_added) added = must_have(realloc(added, (size_t)++num_added * sizeof *added));
        *code = MPI_ERR_LASTCODE + 1 + place;
        added[place] = (Added){is_class ? *code : error_class, is_class, false, NULL};
    }
    return MPI_SUCCESS;
}

static bool is_known_class(int code) {
    if (code >= 0 && code < MPI_ERR_LASTCODE) return true;
    const Added *found = find_added(code);
    return found && found->is_class;
}

int do_Add_error_class(int *errorclass) { return add(0, true, errorclass); }

int do_Add_error_code(int errorclass, int *errorcode) {
    if (!is_known_class(errorclass)) return fail(MPI_ERR_ARG, "%d is no error class", errorclass);
    return add(errorclass, false, errorcode);
}

int do_Add_error_string(int errorcode, const char *string) {
    Added *found = find_added(errorcode);
    if (found == NULL) return fail(MPI_ERR_ARG, "%d is no error code that the program has added", errorcode);
    LOCKED {
        free(found->text);
        found->text = must_have(strndup(string, MPI_MAX_ERROR_STRING - 1));
    }
    return MPI_SUCCESS;
}

static int remove_added(int code, bool is_class) {
    Added *found = find_added(code);
    if (found == NULL || found->is_class != is_class)
        return fail(MPI_ERR_ARG, "%d is no error %s that the program has added", code, is_class ? "class" : "code");
    if (found->text) return fail(MPI_ERR_ARG, "error code %d still has a string", code);
    for (int i = 0; is_class && i < num_added; i++)
        if (!added[i].is_removed && !added[i].is_class && added[i].error_class == code)
            return fail(MPI_ERR_ARG, "error class %d still has codes", code);
    found->is_removed = true;
    return MPI_SUCCESS;
}

int do_Remove_error_class(int errorclass) { return remove_added(errorclass, true); }

int do_Remove_error_code(int errorcode) { return remove_added(errorcode, false); }

int do_Remove_error_string(int errorcode) {
    Added *found = find_added(errorcode);
    if (found == NULL) return fail(MPI_ERR_ARG, "%d is no error code that the program has added", errorcode);
    LOCKED {
        free(found->text);
        found->text = NULL;
    }
    return MPI_SUCCESS;
}

int do_Error_class(int errorcode, int *errorclass) {
    const Added *found = find_added(errorcode);
    if (found == NULL && !is_known_class(errorcode)) return fail(MPI_ERR_ARG, "%d is no error code", errorcode);
    *errorclass = found ? found->error_class : errorcode;
    return MPI_SUCCESS;
}

static const char *text_of_class(int error_class) {
    for (int i = 0; i < NUM_LOWER_CLASSES; i++)
        if (lower_classes[i] == error_class) return lower_texts[i];
    return "unknown error";
}

static const char *text_of(int code) {
    const Added *found = find_added(code);
    if (found == NULL) return text_of_class(code);
    return found->text ? found->text : "";
}

int do_Error_string(int errorcode, char *string, int *resultlen) {
    if (!find_added(errorcode) && !is_known_class(errorcode)) return fail(MPI_ERR_ARG, "%d is no error code", errorcode);
    /* To what the program itself says of a code of its own nothing is added. */
    bool has_words = words[0] && class_of_words == errorcode && !find_added(errorcode);
    *resultlen = snprintf(string, MPI_MAX_ERROR_STRING, has_words ? "%s: %s" : "%s", text_of(errorcode), words);
    if (*resultlen >= MPI_MAX_ERROR_STRING) *resultlen = MPI_MAX_ERROR_STRING - 1;
    return MPI_SUCCESS;
}

/* ---- handlers ---- */

static Errhandler *fatal, *aborting, *returning;
/* Stands for functions on files that have no file yet, and for MPI_FILE_NULL. */
static Object no_file = {.kind = KIND_FILE};

void make_predefined_errhandlers(void) {
    fatal = make_predefined(KIND_ERRHANDLER, sizeof *fatal, BITS(MPI_ERRORS_ARE_FATAL));
    returning = make_predefined(KIND_ERRHANDLER, sizeof *returning, BITS(MPI_ERRORS_RETURN));
    returning->what = HANDLER_RETURN;
    aborting = make_predefined(KIND_ERRHANDLER, sizeof *aborting, BITS(MPI_ERRORS_ABORT));
    aborting->what = HANDLER_ABORT;
#if defined(FACE_MPICH) || defined(FACE_OPENMPI)
    make_predefined_errhandlers_of_cxx();
#endif
}

void *file_errors(void) { return &no_file; }

/* Who stands in for the object of a call that has none: MPI_COMM_SELF; before MPI 4.0 it was MPI_COMM_WORLD, so that a
 * program of then has set the world's handler only. NULL before the start.
 */
static const Object *holder_of_rest(void) {
    if (!process.is_started) return NULL;
    const Object *self = (const Object *)comm_self(), *world = (const Object *)comm_world();
    return self->errhandler || !world->errhandler ? self : world;
}

Errhandler *handler_of(const Object *holder) {
    if (holder && holder->errhandler) return holder->errhandler;
    if (holder && holder->kind == KIND_FILE) return no_file.errhandler ? no_file.errhandler : returning;
    const Object *other = holder ? NULL : holder_of_rest();
    return other && other->errhandler ? other->errhandler : fatal;
}

static void call_handler(const Errhandler *handler, uintptr_t handle, int *code) {
    if (handler->call) {
        handler->call(handler, handle, code);
        return;
    }
    MPI_Comm comm = (MPI_Comm)handle;
    MPI_Win win = (MPI_Win)handle;
    MPI_File file = (MPI_File)handle;
    MPI_Session session = (MPI_Session)handle;
    if (handler->holder == KIND_COMM) ((MPI_Comm_errhandler_function *)handler->function)(&comm, code);
    if (handler->holder == KIND_WIN) ((MPI_Win_errhandler_function *)handler->function)(&win, code);
    if (handler->holder == KIND_FILE) ((MPI_File_errhandler_function *)handler->function)(&file, code);
    if (handler->holder == KIND_SESSION) ((MPI_Session_errhandler_function *)handler->function)(&session, code);
}

/* Hand an error to the handler of an object; the code that the function returns then. */
static int hand_over(const Object *holder, int error, const char *function) {
    Errhandler *handler = handler_of(holder);
    if (handler->what == HANDLER_RETURN) return error;
    if (handler->what != HANDLER_OF_PROGRAM) {
        bool has_words = words[0] && class_of_words == error;
        die("%s: %s%s%s; the error handler is MPI_ERRORS_%s, so the job ends", function, text_of(error),
            has_words ? ": " : "", has_words ? words : "", handler->what == HANDLER_ABORT ? "ABORT" : "ARE_FATAL");
    }
    uintptr_t handle = holder ? holder->handle : 0;
    if (holder == NULL && process.is_started) handle = holder_of_rest()->handle;
    if (holder == &no_file) handle = BITS(MPI_FILE_NULL);
    int code = error;
    keep(handler);
    call_handler(handler, handle, &code);
    /* MPICH's C++ library calls the handler of every error that it sees, so it does not see this one. */
    if (handler->partner) code = MPI_SUCCESS;
    let_go(handler);
    return code;
}

int end_call(int error, void *holder, const char *function) {
    if (__builtin_expect(error == MPI_SUCCESS, 1)) return MPI_SUCCESS;
    Object *chosen = blamed ? blamed : (Object *)holder;
    blamed = NULL;
    return hand_over(chosen, error, function);
}

int refuse_call(const char *function) {
    int error = fail(MPI_ERR_UNSUPPORTED_OPERATION, "Remesh does not carry %s; docs/mpi/limits.md lists what it does not carry",
                     function);
    /* Never the world's: a program that looks at no answer is to end here, not to go on without what it asked for. */
    return end_call(error, process.is_started ? comm_self() : NULL, function);
}

/* ---- functions on handlers ---- */

static Errhandler *make_handler(ObjectKind holder, void (*function)(void)) {
    Errhandler *made = make_object(KIND_ERRHANDLER, sizeof *made);
    made->what = HANDLER_OF_PROGRAM;
    made->holder = holder;
    made->function = function;
    return made;
}

static int set_handler(Object *holder, Errhandler *handler) {
    if (handler->what == HANDLER_OF_PROGRAM && !handler->object.is_predefined && handler->holder != holder->kind)
        return fail(MPI_ERR_ARG, "the error handler was made for objects of another kind");
    keep(handler);
    Errhandler *before = holder->errhandler;
    holder->errhandler = handler;
    let_go(before);
    return MPI_SUCCESS;
}

static int get_handler(const Object *holder, Errhandler **handler) {
    *handler = handler_of(holder);
    /* The program gets a handle of its own, which it frees. */
    keep(*handler);
    return MPI_SUCCESS;
}

static int call_errhandler(const Object *holder, int code, const char *function) {
    words[0] = 0;
    if (code != MPI_SUCCESS) hand_over(holder, code, function);
    return MPI_SUCCESS;
}

#define HANDLERS_OF(Name, Type, KIND, object)                                                                      \
    int do_##Name##_create_errhandler(MPI_##Name##_errhandler_function *function, Errhandler **errhandler) {       \
        *errhandler = make_handler(KIND, (void (*)(void))function);                                               \
        return MPI_SUCCESS;                                                                                       \
    }                                                                                                             \
    int do_##Name##_set_errhandler(Type *of, Errhandler *handler) { return set_handler((Object *)(object), handler); } \
    int do_##Name##_get_errhandler(Type *of, Errhandler **handler) { return get_handler((Object *)(object), handler); } \
    int do_##Name##_call_errhandler(Type *of, int code) {                                                          \
        return call_errhandler((const Object *)(object), code, "MPI_" #Name "_call_errhandler");                  \
    }
/* do_Comm_create_errhandler */ /* do_Comm_set_errhandler */ /* do_Comm_get_errhandler */ /* do_Comm_call_errhandler */
HANDLERS_OF(Comm, Comm, KIND_COMM, of)
/* do_Win_create_errhandler */ /* do_Win_set_errhandler */ /* do_Win_get_errhandler */ /* do_Win_call_errhandler */
HANDLERS_OF(Win, Win, KIND_WIN, of)
/* do_File_create_errhandler */ /* do_File_set_errhandler */ /* do_File_get_errhandler */ /* do_File_call_errhandler */
HANDLERS_OF(File, File, KIND_FILE, of ? (Object *)of : &no_file)
/* do_Session_create_errhandler */ /* do_Session_set_errhandler */ /* do_Session_get_errhandler */
/* do_Session_call_errhandler */
HANDLERS_OF(Session, Session, KIND_SESSION, of)

int do_Errhandler_free(MPI_Errhandler *errhandler) {
    Errhandler *handler = errhandler_of(*errhandler);
    if (handler == NULL) return fail(MPI_ERR_ARG, "there is no such error handler");
    /* Each handle that was given out is one reference; the last makes the handle void. */
    if (handler->object.references > 1) let_go(handler);
    else free_handle(handler);
    *errhandler = MPI_ERRHANDLER_NULL;
    return MPI_SUCCESS;
}

int do_Errhandler_create(MPI_Handler_function *function, Errhandler **errhandler) {
    return do_Comm_create_errhandler((MPI_Comm_errhandler_function *)function, errhandler);
}
int do_Errhandler_set(Comm *comm, Errhandler *errhandler) { return do_Comm_set_errhandler(comm, errhandler); }
int do_Errhandler_get(Comm *comm, Errhandler **errhandler) { return do_Comm_get_errhandler(comm, errhandler); }
