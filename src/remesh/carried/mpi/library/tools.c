/* The tools' interface: it can be started and ended, and there is nothing to see. */
#include "core.h"

static atomic_int num_started;

int do_T_init_thread(int required, int *provided) {
    *provided = required;
    atomic_fetch_add(&num_started, 1);
    return MPI_SUCCESS;
}

int do_T_finalize(void) {
    if (atomic_fetch_sub(&num_started, 1) > 0) return MPI_SUCCESS;
    atomic_fetch_add(&num_started, 1);
    return MPI_T_ERR_NOT_INITIALIZED;
}

static int none(int *count) {
    *count = 0;
    return num_started > 0 ? MPI_SUCCESS : MPI_T_ERR_NOT_INITIALIZED;
}

int do_T_cvar_get_num(int *num_cvar) { return none(num_cvar); }
int do_T_pvar_get_num(int *num_pvar) { return none(num_pvar); }
int do_T_event_get_num(int *num_events) { return none(num_events); }
int do_T_source_get_num(int *num_sources) { return none(num_sources); }
int do_T_category_get_num(int *num_cat) { return none(num_cat); }
int do_T_category_changed(int *update_number) { return none(update_number); }

#if defined(FACE_MPICH)
/* A number in the other faces; in this one programs name data. */
EXPORTED extern void *const MPI_T_PVAR_ALL_HANDLES;
static int all_handles;
void *const MPI_T_PVAR_ALL_HANDLES = &all_handles;
#endif
