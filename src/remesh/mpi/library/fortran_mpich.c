/* What MPICH's own Fortran library, which serves mpif.h and both modules, wants of MPICH besides MPI.
 *
 * A program that was compiled against MPICH brings that library along. Names and arguments are facts of its binary
 * interface: attributes that are integers, proxies that call a keyval's Fortran functions, generalized requests whose
 * functions are Fortran's, and addresses that Fortran gives for statuses that nobody wants.
 */
#include "core.h"

#if defined(FACE_MPICH)

#include "attributes.h"
#include "comm.h"
#include "request.h"
#include "win.h"

EXPORTED MPI_Fint *MPI_F_STATUS_IGNORE, *MPI_F_STATUSES_IGNORE;
EXPORTED MPI_F08_status *MPI_F08_STATUS_IGNORE, *MPI_F08_STATUSES_IGNORE;

/* Argument `type` of the functions below: how the caller sees a value. */
enum { AS_POINTER = 0, AS_ADDRESS = 1, AS_INTEGER = 3 };

/* ---- Attributes ---- */

/* Predefined keyvals are odd numbers in C, and the next one in Fortran. */
static int keyval_in_c(int keyval) { return functions_of_keyval(keyval) || keyval & 1 ? keyval : keyval - 1; }

/* A predefined one has its value where C gets the address of; Fortran gets the value. */
static void see(void *value, int keyval, int type) {
    int *predefined;
    memcpy(&predefined, value, sizeof predefined);
    if (type == AS_POINTER || functions_of_keyval(keyval)) return;
    /* Of a window, the base and the size are addresses. */
    intptr_t number = keyval == MPI_WIN_BASE ? (intptr_t)predefined
                      : keyval == MPI_WIN_SIZE ? (intptr_t)*(MPI_Aint *)(void *)predefined
                                               : (intptr_t)*predefined;
    memcpy(value, &number, sizeof number);
}

#define ATTRIBUTES_OF(Name, Handle, object, error_class)                                                            \
    EXPORTED int MPII_##Name##_set_attr(Handle handle, int keyval, void *value, int type);                         \
    int MPII_##Name##_set_attr(Handle handle, int keyval, void *value, int type) {                                 \
        (void)type;                                                                                                \
        void *holder = object(handle);                                                                             \
        int error = holder ? MPI_SUCCESS : fail(error_class, "the handle is none");                                \
        if (!error) error = do_##Name##_set_attr(holder, keyval, value);                                           \
        return end_call(error, holder, "MPI_" #Name "_set_attr");                                                  \
    }                                                                                                              \
    EXPORTED int MPII_##Name##_get_attr(Handle handle, int keyval, void *value, int *flag, int type);              \
    int MPII_##Name##_get_attr(Handle handle, int keyval, void *value, int *flag, int type) {                      \
        void *holder = object(handle);                                                                             \
        int error = holder ? MPI_SUCCESS : fail(error_class, "the handle is none");                                \
        keyval = keyval_in_c(keyval);                                                                              \
        if (!error) error = do_##Name##_get_attr(holder, keyval, value, flag);                                     \
        if (!error && *flag) see(value, keyval, type);                                                             \
        return end_call(error, holder, "MPI_" #Name "_get_attr");                                                  \
    }
ATTRIBUTES_OF(Comm, MPI_Comm, comm_of, MPI_ERR_COMM)
ATTRIBUTES_OF(Type, MPI_Datatype, datatype_of, MPI_ERR_TYPE)
ATTRIBUTES_OF(Win, MPI_Win, win_of, MPI_ERR_WIN)

typedef int CopyProxy(Callback *copy, int handle, int keyval, void *extra_state, int type, void *value, void **copied,
                      int *flag);
typedef int DeleteProxy(Callback *delete, int handle, int keyval, int type, void *value, void *extra_state);

static int copy_by_proxy(const KeyvalFunctions *own, Object *of, int keyval, void *value, void **copied, int *flag) {
    CopyProxy *proxy = (CopyProxy *)own->copy_proxy;
    return proxy(own->copy, (int)of->handle, keyval, own->extra_state, AS_POINTER, value, copied, flag);
}

static int delete_by_proxy(const KeyvalFunctions *own, Object *of, int keyval, void *value) {
    DeleteProxy *proxy = (DeleteProxy *)own->delete_proxy;
    return proxy(own->delete, (int)of->handle, keyval, AS_POINTER, value, own->extra_state);
}

EXPORTED void MPII_Keyval_set_proxy(int keyval, Callback *copy_proxy, Callback *delete_proxy);
void MPII_Keyval_set_proxy(int keyval, Callback *copy_proxy, Callback *delete_proxy) {
    KeyvalFunctions *functions = functions_of_keyval(keyval);
    if (!functions) return;
    functions->copy_proxy = copy_proxy;
    functions->delete_proxy = delete_proxy;
    functions->call_copy = copy_by_proxy;
    functions->call_delete = delete_by_proxy;
}

/* ---- Generalized requests ---- */

EXPORTED void MPII_Grequest_set_lang_f77(MPI_Request handle);
void MPII_Grequest_set_lang_f77(MPI_Request handle) {
    Request *request = request_of(handle);
    if (request && request->generalized) speak_fortran(request);
}

/* ---- What only MPICH has ---- */

#define REFUSED(name)                                        \
    EXPORTED int name(void);                                 \
    int name(void) { return refuse_call(#name); }            \
    EXPORTED int P##name(void);                              \
    int P##name(void) { return refuse_call(#name); }
REFUSED(MPIX_Comm_agree)
REFUSED(MPIX_Comm_failure_ack)
REFUSED(MPIX_Comm_failure_get_acked)
REFUSED(MPIX_Comm_revoke)
REFUSED(MPIX_Comm_shrink)

/* MPI 4.1 took these over under another name. */
#define REMOVES(what)                                                                                       \
    EXPORTED int MPIX_Delete_error_##what(int number);                                                      \
    int MPIX_Delete_error_##what(int number) {                                                              \
        return end_call(do_Remove_error_##what(number), NULL, "MPIX_Delete_error_" #what);                  \
    }                                                                                                       \
    EXPORTED int PMPIX_Delete_error_##what(int number);                                                     \
    int PMPIX_Delete_error_##what(int number) { return MPIX_Delete_error_##what(number); }
REMOVES(class)
REMOVES(code)
REMOVES(string)

/* There is no such memory: not an error, but the answer. */
#define NOT_SUPPORTED(name)                                  \
    EXPORTED int name(void);                                 \
    int name(void) { return 0; }                             \
    EXPORTED int P##name(void);                              \
    int P##name(void) { return 0; }
NOT_SUPPORTED(MPIX_Query_cuda_support)
NOT_SUPPORTED(MPIX_Query_hip_support)
NOT_SUPPORTED(MPIX_Query_ze_support)

EXPORTED int MPIX_GPU_query_support(int kind, int *is_supported);
int MPIX_GPU_query_support(int kind, int *is_supported) { return (void)kind, *is_supported = 0, MPI_SUCCESS; }
EXPORTED int PMPIX_GPU_query_support(int kind, int *is_supported);
int PMPIX_GPU_query_support(int kind, int *is_supported) { return MPIX_GPU_query_support(kind, is_supported); }

#endif
