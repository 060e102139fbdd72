/* Keyvals, and the attributes that stand under them. Source: MPI 4.1, section 7.7.
 *
 * A keyval lives as long as the program has not freed it or an attribute stands under it. Callbacks are called without
 * any lock held: they may call MPI, and this file.
 */
#include "attributes.h"

#include "comm.h"
#include "datatype.h"
#include "entry.h"
#include "errors.h"
#include "win.h"

typedef struct {
    int references; /* the program's, and one of each attribute */
    bool is_freed;
    ObjectKind kind;
    KeyvalFunctions functions;
} Keyval;

typedef struct Attribute Attribute;
struct Attribute {
    Attribute *next; /* older */
    int keyval;
    Language set_in;
    void *value; /* as it was set */
};

/* ---- Keyvals ---- */

/* Far from the predefined ones of all faces. */
enum { FIRST_KEYVAL = 1 << 20 };
static Keyval **keyvals;
static int num_keyvals;

static Keyval *find_keyval(int number) {
    Keyval *keyval = NULL;
    LOCKED if (number >= FIRST_KEYVAL && number < FIRST_KEYVAL + num_keyvals) keyval = keyvals[number - FIRST_KEYVAL];
    return keyval;
}

KeyvalFunctions *functions_of_keyval(int number) {
    Keyval *keyval = find_keyval(number);
    return keyval ? &keyval->functions : NULL;
}

static void let_keyval_go(int number) {
    LOCKED {
        Keyval *keyval = keyvals[number - FIRST_KEYVAL];
        if (--keyval->references == 0) {
            free(keyval);
            keyvals[number - FIRST_KEYVAL] = NULL;
        }
    }
}

int create_keyval(ObjectKind kind, KeyvalFunctions functions, int *keyval) {
    Keyval *made = NEW(Keyval);
    *made = (Keyval){1, false, kind, functions};
    LOCKED {
        int place = 0;
        while (place < num_keyvals && keyvals[place]) place++;
        if (place == num_keyvals) {
            keyvals = must_have(realloc(keyvals, (size_t)++num_keyvals * sizeof *keyvals));
        }
        keyvals[place] = made;
        *keyval = FIRST_KEYVAL + place;
    }
    return MPI_SUCCESS;
}

/* The keyval, if the program may use it for objects of this kind. */
static int check_keyval(ObjectKind kind, int number, Keyval **keyval) {
    *keyval = find_keyval(number);
    if (*keyval && (*keyval)->kind == kind) return MPI_SUCCESS;
    if (number == MPI_KEYVAL_INVALID) return fail(MPI_ERR_KEYVAL, "the keyval is MPI_KEYVAL_INVALID");
    return fail(MPI_ERR_KEYVAL, "there is no keyval %d for such objects, or it is predefined", number);
}

static int free_keyval(ObjectKind kind, int *number) {
    Keyval *keyval;
    TRY(check_keyval(kind, *number, &keyval));
    /* While attributes stand under it, it may be freed again, as from a delete function; that changes nothing. */
    if (!keyval->is_freed) {
        keyval->is_freed = true;
        let_keyval_go(*number);
    }
    *number = MPI_KEYVAL_INVALID;
    return MPI_SUCCESS;
}

/* ---- Callbacks ---- */

/* The standard ABI has this number for a function that copies the value. */
#define IS_DUP(function) ((uintptr_t)(function) == 1)

/* What C sees of it, for as long as it stands. */
static void *seen_in_c(Attribute *one) { return one->set_in == IN_C ? one->value : &one->value; }

static int call_copy(const Keyval *keyval, Object *object, Attribute *one, void **copied, int *flag) {
    int number = one->keyval;
    void *value = seen_in_c(one);
    const KeyvalFunctions *own = &keyval->functions;
    *flag = 0;
    if (!own->copy) return MPI_SUCCESS;
    if (IS_DUP(own->copy)) {
        *copied = value;
        *flag = 1;
        return MPI_SUCCESS;
    }
    if (own->call_copy) return own->call_copy(own, object, number, one->set_in, one->value, copied, flag);
    switch (keyval->kind) {
    case KIND_COMM:
        return ((MPI_Comm_copy_attr_function *)own->copy)(
            (MPI_Comm)object->handle, number, own->extra_state, value, copied, flag);
    case KIND_DATATYPE:
        return ((MPI_Type_copy_attr_function *)own->copy)(
            (MPI_Datatype)object->handle, number, own->extra_state, value, copied, flag);
    default:
        return ((MPI_Win_copy_attr_function *)own->copy)(
            (MPI_Win)object->handle, number, own->extra_state, value, copied, flag);
    }
}

static int call_delete(const Keyval *keyval, Object *object, Attribute *one) {
    int number = one->keyval;
    void *value = seen_in_c(one);
    const KeyvalFunctions *own = &keyval->functions;
    if (!own->delete) return MPI_SUCCESS;
    if (own->call_delete) return own->call_delete(own, object, number, one->set_in, one->value);
    switch (keyval->kind) {
    case KIND_COMM:
        return ((MPI_Comm_delete_attr_function *)own->delete)(
            (MPI_Comm)object->handle, number, value, own->extra_state);
    case KIND_DATATYPE:
        return ((MPI_Type_delete_attr_function *)own->delete)(
            (MPI_Datatype)object->handle, number, value, own->extra_state);
    default:
        return ((MPI_Win_delete_attr_function *)own->delete)(
            (MPI_Win)object->handle, number, value, own->extra_state);
    }
}

static int callback_failed(int error, const char *what, int number) {
    return error ? fail(error, "the %s function of keyval %d gave an error", what, number) : MPI_SUCCESS;
}

/* ---- Attributes of one object ---- */

static Attribute **find(Attributes *attributes, int number) {
    Attribute **place = &attributes->first;
    while (*place && (*place)->keyval != number) place = &(*place)->next;
    return *place ? place : NULL;
}

static Attribute *get(Attributes *attributes, int number) {
    Attribute **place = NULL;
    LOCKED place = find(attributes, number);
    return place ? *place : NULL;
}

/* Puts a new one in front. */
static void put(Attributes *attributes, int number, Language set_in, void *value) {
    Attribute *attribute = NEW(Attribute);
    LOCKED {
        *attribute = (Attribute){attributes->first, number, set_in, value};
        attributes->first = attribute;
        keyvals[number - FIRST_KEYVAL]->references++;
    }
}

static void take_out(Attributes *attributes, int number) {
    Attribute *attribute = NULL;
    LOCKED {
        Attribute **place = find(attributes, number);
        if (place) {
            attribute = *place;
            *place = attribute->next;
        }
    }
    if (attribute) let_keyval_go(number);
    free(attribute);
}

static int delete_one(Object *object, Attributes *attributes, Attribute *one) {
    int number = one->keyval, error = call_delete(find_keyval(number), object, one);
    TRY(callback_failed(error, "delete", number));
    take_out(attributes, number);
    return MPI_SUCCESS;
}

int delete_attributes(Object *object, Attributes *attributes) {
    while (attributes->first) TRY(delete_one(object, attributes, attributes->first));
    return MPI_SUCCESS;
}

static int copy_one(Object *from, Attribute *one, Attributes *to) {
    const Keyval *keyval = find_keyval(one->keyval);
    void *copied = NULL;
    int flag = 0;
    int error = call_copy(keyval, from, one, &copied, &flag);
    TRY(callback_failed(error, "copy", one->keyval));
    if (!flag) return MPI_SUCCESS;
    /* A function of C that gives back the address of a number, as MPI's own does, has copied the number. */
    bool is_number = one->set_in != IN_C && (keyval->functions.call_copy || copied == seen_in_c(one));
    if (is_number && !keyval->functions.call_copy) copied = one->value;
    put(to, one->keyval, is_number ? one->set_in : IN_C, copied);
    return MPI_SUCCESS;
}

int copy_attributes(Object *from, const Attributes *of, Attributes *to) {
    int count = 0, at = 0, error = MPI_SUCCESS;
    for (const Attribute *one = of->first; one; one = one->next) count++;
    Attribute **oldest_last = NEW_ARRAY(Attribute *, count);
    for (Attribute *one = of->first; one; one = one->next) oldest_last[at++] = one;
    while (at > 0 && !error) error = copy_one(from, oldest_last[--at], to);
    free(oldest_last);
    return error;
}

static int set_attribute(Object *object, Attributes *attributes, int number, Language language, void *value) {
    Keyval *keyval;
    TRY(check_keyval((ObjectKind)object->kind, number, &keyval));
    if (keyval->is_freed) return fail(MPI_ERR_KEYVAL, "keyval %d has been freed", number);
    Attribute *old = get(attributes, number);
    if (old) TRY(delete_one(object, attributes, old));
    put(attributes, number, language, value);
    return MPI_SUCCESS;
}

static int get_attribute(
    const Object *object, Attributes *attributes, int number, Language language, void *attribute_val, int *flag) {
    Keyval *keyval;
    TRY(check_keyval((ObjectKind)object->kind, number, &keyval));
    Attribute *one = get(attributes, number);
    *flag = one != NULL;
    if (one) *(void **)attribute_val = language == IN_C ? seen_in_c(one) : one->value;
    return MPI_SUCCESS;
}

/* What Fortran sees of a predefined one, which C gets the address of; the base of a window is that address. */
static void *value_of_predefined(int number, void *at) {
    if (number == MPI_WIN_BASE) return at;
    return (void *)(intptr_t)(number == MPI_WIN_SIZE ? *(MPI_Aint *)at : *(int *)at);
}

static int delete_attribute(Object *object, Attributes *attributes, int number) {
    Keyval *keyval;
    TRY(check_keyval((ObjectKind)object->kind, number, &keyval));
    Attribute *one = get(attributes, number);
    if (!one) return fail(MPI_ERR_KEYVAL, "no attribute stands under keyval %d", number);
    return delete_one(object, attributes, one);
}

/* ---- Communicators ---- */

/* The value of a predefined keyval stands where the program gets the address of; NULL: there is no such keyval. */
static int *predefined_of_comm(int number) {
    static int tag_ub = INT_MAX, io = MPI_ANY_SOURCE, is_global, host = MPI_PROC_NULL, appnum, universe_size, last_code;
    universe_size = process.size;
    last_code = last_used_code();
    const int numbers[] = {MPI_TAG_UB, MPI_IO, MPI_WTIME_IS_GLOBAL, MPI_HOST, MPI_APPNUM, MPI_UNIVERSE_SIZE,
        MPI_LASTUSEDCODE};
    int *const values[] = {&tag_ub, &io, &is_global, &host, &appnum, &universe_size, &last_code};
    for (size_t i = 0; i < sizeof numbers / sizeof *numbers; i++) {
        if (numbers[i] == number) return values[i];
    }
    return NULL;
}

int do_Comm_create_keyval(
    MPI_Comm_copy_attr_function *comm_copy_attr_fn, MPI_Comm_delete_attr_function *comm_delete_attr_fn,
    int *comm_keyval, void *extra_state) {
    KeyvalFunctions functions = {
        .copy = (Callback *)comm_copy_attr_fn, .delete = (Callback *)comm_delete_attr_fn, .extra_state = extra_state};
    return create_keyval(KIND_COMM, functions, comm_keyval);
}

int do_Comm_free_keyval(int *comm_keyval) { return free_keyval(KIND_COMM, comm_keyval); }

static int set_of_comm(Comm *comm, int keyval, Language language, void *value) {
    return set_attribute(&comm->object, &comm->attributes, keyval, language, value);
}

static int get_of_comm(Comm *comm, int keyval, Language language, void *value, int *flag) {
    int *predefined = predefined_of_comm(keyval);
    if (!predefined) return get_attribute(&comm->object, &comm->attributes, keyval, language, value, flag);
    *(void **)value = language == IN_C ? predefined : value_of_predefined(keyval, predefined);
    *flag = 1;
    return MPI_SUCCESS;
}

int do_Comm_set_attr(Comm *comm, int comm_keyval, void *attribute_val) {
    return set_of_comm(comm, comm_keyval, IN_C, attribute_val);
}

int do_Comm_get_attr(Comm *comm, int comm_keyval, void *attribute_val, int *flag) {
    return get_of_comm(comm, comm_keyval, IN_C, attribute_val, flag);
}

int do_Comm_delete_attr(Comm *comm, int comm_keyval) {
    return delete_attribute(&comm->object, &comm->attributes, comm_keyval);
}

/* Their names of MPI 1. */
int do_Keyval_create(MPI_Copy_function *copy_fn, MPI_Delete_function *delete_fn, int *keyval, void *extra_state) {
    return do_Comm_create_keyval(copy_fn, delete_fn, keyval, extra_state);
}

int do_Keyval_free(int *keyval) { return do_Comm_free_keyval(keyval); }

int do_Attr_put(Comm *comm, int keyval, void *attribute_val) { return do_Comm_set_attr(comm, keyval, attribute_val); }

int do_Attr_get(Comm *comm, int keyval, void *attribute_val, int *flag) {
    return do_Comm_get_attr(comm, keyval, attribute_val, flag);
}

int do_Attr_delete(Comm *comm, int keyval) { return do_Comm_delete_attr(comm, keyval); }

/* ---- Datatypes ---- */

int do_Type_create_keyval(
    MPI_Type_copy_attr_function *type_copy_attr_fn, MPI_Type_delete_attr_function *type_delete_attr_fn,
    int *type_keyval, void *extra_state) {
    KeyvalFunctions functions = {
        .copy = (Callback *)type_copy_attr_fn, .delete = (Callback *)type_delete_attr_fn, .extra_state = extra_state};
    return create_keyval(KIND_DATATYPE, functions, type_keyval);
}

int do_Type_free_keyval(int *type_keyval) { return free_keyval(KIND_DATATYPE, type_keyval); }

static int set_of_type(Datatype *datatype, int keyval, Language language, void *value) {
    return set_attribute(&datatype->object, &datatype->attributes, keyval, language, value);
}

static int get_of_type(Datatype *datatype, int keyval, Language language, void *value, int *flag) {
    return get_attribute(&datatype->object, &datatype->attributes, keyval, language, value, flag);
}

int do_Type_set_attr(Datatype *datatype, int type_keyval, void *attribute_val) {
    return set_of_type(datatype, type_keyval, IN_C, attribute_val);
}

int do_Type_get_attr(Datatype *datatype, int type_keyval, void *attribute_val, int *flag) {
    return get_of_type(datatype, type_keyval, IN_C, attribute_val, flag);
}

int do_Type_delete_attr(Datatype *datatype, int type_keyval) {
    return delete_attribute(&datatype->object, &datatype->attributes, type_keyval);
}

/* ---- Windows ---- */

int do_Win_create_keyval(
    MPI_Win_copy_attr_function *win_copy_attr_fn, MPI_Win_delete_attr_function *win_delete_attr_fn, int *win_keyval,
    void *extra_state) {
    KeyvalFunctions functions = {
        .copy = (Callback *)win_copy_attr_fn, .delete = (Callback *)win_delete_attr_fn, .extra_state = extra_state};
    return create_keyval(KIND_WIN, functions, win_keyval);
}

int do_Win_free_keyval(int *win_keyval) { return free_keyval(KIND_WIN, win_keyval); }

static int set_of_win(Win *win, int keyval, Language language, void *value) {
    return set_attribute(&win->object, &win->attributes, keyval, language, value);
}

static int get_of_win(Win *win, int keyval, Language language, void *value, int *flag) {
    void *predefined;
    *flag = predefined_of_window(win, keyval, &predefined);
    if (!*flag) return get_attribute(&win->object, &win->attributes, keyval, language, value, flag);
    *(void **)value = language == IN_C ? predefined : value_of_predefined(keyval, predefined);
    return MPI_SUCCESS;
}

int do_Win_set_attr(Win *win, int win_keyval, void *attribute_val) {
    return set_of_win(win, win_keyval, IN_C, attribute_val);
}

int do_Win_get_attr(Win *win, int win_keyval, void *attribute_val, int *flag) {
    return get_of_win(win, win_keyval, IN_C, attribute_val, flag);
}

int do_Win_delete_attr(Win *win, int win_keyval) {
    return delete_attribute(&win->object, &win->attributes, win_keyval);
}

/* ---- For callers of other languages ---- */

#define ATTRIBUTES_OF(name, Name, Handle, object_of_handle, error_class)                                          \
    int set_##name##_attribute(Handle handle, int keyval, Language language, void *value) {                       \
        if (!is_running()) return not_running("MPI_" #Name "_set_attr");                                          \
        void *holder = object_of_handle(handle);                                                                  \
        int error = holder ? set_of_##name(holder, keyval, language, value) : fail(error_class, "the handle is none"); \
        return end_call(error, holder, "MPI_" #Name "_set_attr");                                                 \
    }                                                                                                             \
    int get_##name##_attribute(Handle handle, int keyval, Language language, void *value, int *flag) {            \
        if (!is_running()) return not_running("MPI_" #Name "_get_attr");                                          \
        void *holder = object_of_handle(handle);                                                                  \
        int error = holder ? get_of_##name(holder, keyval, language, value, flag)                                 \
                           : fail(error_class, "the handle is none");                                             \
        return end_call(error, holder, "MPI_" #Name "_get_attr");                                                 \
    }
ATTRIBUTES_OF(comm, Comm, MPI_Comm, comm_of, MPI_ERR_COMM)
ATTRIBUTES_OF(type, Type, MPI_Datatype, datatype_of, MPI_ERR_TYPE)
ATTRIBUTES_OF(win, Win, MPI_Win, win_of, MPI_ERR_WIN)
