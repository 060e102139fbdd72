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

/* What its module mpi_f08 gives C for graphs without weights. Its library has variables of these names, too: which ones the
 * loader takes for both is unknown before it has.
 */
EXPORTED int *MPIR_C_MPI_UNWEIGHTED, *MPIR_C_MPI_WEIGHTS_EMPTY;
__attribute__((constructor)) static void tell_weights(void) {
    MPIR_C_MPI_UNWEIGHTED = MPI_UNWEIGHTED;
    MPIR_C_MPI_WEIGHTS_EMPTY = MPI_WEIGHTS_EMPTY;
}

/* Argument `type` of the functions below: how the caller sees a value. */
enum { AS_POINTER = 0, AS_ADDRESS = 1, AS_INTEGER = 3 };

static Language language_of(int type) { return type == AS_POINTER ? IN_C : IN_FORTRAN; }
static int type_of(Language set_in) { return set_in == IN_C ? AS_POINTER : AS_ADDRESS; }

/* ---- Attributes ---- */

/* Predefined keyvals are odd numbers in C, and the next one in Fortran. */
static int keyval_in_c(int keyval) { return functions_of_keyval(keyval) || keyval & 1 ? keyval : keyval - 1; }

#define ATTRIBUTES_OF(name, Name, Handle)                                                                          \
    EXPORTED int MPII_##Name##_set_attr(Handle handle, int keyval, void *value, int type);                        \
    int MPII_##Name##_set_attr(Handle handle, int keyval, void *value, int type) {                                \
        return set_##name##_attribute(handle, keyval, language_of(type), value);                                  \
    }                                                                                                             \
    EXPORTED int MPII_##Name##_get_attr(Handle handle, int keyval, void *value, int *flag, int type);             \
    int MPII_##Name##_get_attr(Handle handle, int keyval, void *value, int *flag, int type) {                     \
        return get_##name##_attribute(handle, keyval_in_c(keyval), language_of(type), value, flag);               \
    }
ATTRIBUTES_OF(comm, Comm, MPI_Comm)
ATTRIBUTES_OF(type, Type, MPI_Datatype)
ATTRIBUTES_OF(win, Win, MPI_Win)

typedef int CopyProxy(Callback *copy, int handle, int keyval, void *extra_state, int type, void *value, void **copied,
                      int *flag);
typedef int DeleteProxy(Callback *delete, int handle, int keyval, int type, void *value, void *extra_state);

static int copy_by_proxy(const KeyvalFunctions *own, Object *of, int keyval, Language set_in, void *value, void **copied,
                         int *flag) {
    CopyProxy *proxy = (CopyProxy *)own->copy_proxy;
    return proxy(own->copy, (int)of->handle, keyval, own->extra_state, type_of(set_in), value, copied, flag);
}

static int delete_by_proxy(const KeyvalFunctions *own, Object *of, int keyval, Language set_in, void *value) {
    DeleteProxy *proxy = (DeleteProxy *)own->delete_proxy;
    return proxy(own->delete, (int)of->handle, keyval, type_of(set_in), value, own->extra_state);
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
