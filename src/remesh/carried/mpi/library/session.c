/* Sessions: groups of the processes by the names of their sets. Source: MPI 4.1, section 11.3.
 *
 * Two sets are there, which every MPI has. No MPI library is asked: the ranks of a job stay the same over checkpoints.
 */
#include <strings.h>

#include "channel.h"
#include "comm.h"
#include "entry.h"
#include "environment.h"
#include "errors.h"
#include "group.h"
#include "info.h"

struct Session {
    Object object;
    Info *info;
};

static const char *const sets[] = {"mpi://WORLD", "mpi://SELF"};
enum { NUM_SETS = sizeof sets / sizeof *sets };

static void destroy_session(void *session) { let_go(((Session *)session)->info); }

int do_Session_init(Info *info, Errhandler *errhandler, Session **session) {
    TRY(start_process());
    set_destructor(KIND_SESSION, destroy_session);
    *session = make_object(KIND_SESSION, sizeof **session);
    (*session)->info = copy_info(info);
    /* What is provided, whatever is asked for. */
    put_info((*session)->info, "thread_level", "MPI_THREAD_MULTIPLE");
    keep(errhandler);
    (*session)->object.errhandler = errhandler;
    atomic_fetch_add(&num_sessions, 1);
    return MPI_SUCCESS;
}

int do_Session_finalize(MPI_Session *session) {
    Session *found = session_of(*session);
    if (found == NULL) return fail(MPI_ERR_SESSION, "the session is null or has been finalized");
    atomic_fetch_sub(&num_sessions, 1);
    free_handle(found);
    *session = MPI_SESSION_NULL;
    /* A program without MPI_Init ends MPI with its last session. */
    return is_running() ? MPI_SUCCESS : end_process();
}

int do_Session_get_info(Session *session, Info **info_used) {
    *info_used = copy_info(session->info);
    return MPI_SUCCESS;
}

int do_Session_get_num_psets(Session *session, Info *info, int *npset_names) {
    (void)session, (void)info;
    *npset_names = NUM_SETS;
    return MPI_SUCCESS;
}

int do_Session_get_nth_pset(Session *session, Info *info, int n, int *pset_len, char *pset_name) {
    (void)session, (void)info;
    if (n < 0 || n >= NUM_SETS) return fail(MPI_ERR_ARG, "process set %d of %d", n, NUM_SETS);
    if (*pset_len > 0) snprintf(pset_name, (size_t)*pset_len, "%s", sets[n]);
    *pset_len = (int)strlen(sets[n]) + 1;
    return MPI_SUCCESS;
}

/* MPI_ERR_ARG if there is no set of this name, which may be written in any case. */
static int find_set(const char *name, const Comm **members) {
    if (!strcasecmp(name, sets[0])) *members = comm_world();
    else if (!strcasecmp(name, sets[1])) *members = comm_self();
    else return fail(MPI_ERR_ARG, "there is no process set %s, expected %s or %s", name, sets[0], sets[1]);
    return MPI_SUCCESS;
}

int do_Session_get_pset_info(Session *session, const char *pset_name, Info **info) {
    (void)session;
    const Comm *members;
    TRY(find_set(pset_name, &members));
    char size[16];
    snprintf(size, sizeof size, "%d", members->size);
    *info = copy_info(NULL);
    put_info(*info, "mpi_size", size);
    return MPI_SUCCESS;
}

int do_Group_from_session_pset(Session *session, const char *pset_name, Group **newgroup) {
    const Comm *members;
    TRY(find_set(pset_name, &members));
    *newgroup = make_group(members->size, members->world);
    keep(session);
    (*newgroup)->session = session;
    return MPI_SUCCESS;
}
