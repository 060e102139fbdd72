/* Windows are made and freed. All members of the communicator call; nobody accesses a rank before everybody knows what
 * everybody gives.
 */
#include "channel.h"
#include "exchange.h"
#include "info.h"
#include "win.h"

/* Memory of a dynamic window. */
typedef struct Attached Attached;
struct Attached {
    Attached *next;
    char *at;
    MPI_Aint num_bytes;
};

static void destroy_window(void *object) {
    Win *win = object;
    while (win->attached) {
        Attached *next = win->attached->next;
        free(win->attached);
        win->attached = next;
    }
    if (win->owns_memory) free(win->base);
    let_go(win->comm);
    let_go(win->info);
    free(win->units);
    free(win->sizes);
    free(win->pending);
    free(win->locked);
    free(win->started);
    free(win->words);
    free(win->is_partner);
}

/* ---- Making them ---- */

static Win *new_window(Comm *comm, int flavor) {
    set_destructor(KIND_WIN, destroy_window);
    Win *win = make_object(KIND_WIN, sizeof(Win));
    win->comm = comm;
    win->flavor = flavor;
    win->model = MPI_WIN_UNIFIED;
    win->units = NEW_ARRAY(MPI_Aint, comm->size);
    win->sizes = NEW_ARRAY(MPI_Aint, comm->size);
    win->locked = NEW_ARRAY(uint8_t, comm->size);
    win->words = NEW_ARRAY(Request *, comm->size);
    win->is_partner = NEW_ARRAY(bool, comm->size);
    win->num_started = -1;
    return win;
}

/* What this rank gives. */
typedef struct {
    void *base;
    MPI_Aint size, unit;
    bool is_owned;
} Share;

typedef struct {
    int64_t unit, size;
} Said;

/* Tells the lower half, and learns what the others give. */
static int publish(Win *win, const Share *share) {
    Said mine = {share->unit, share->size}, *all = NEW_ARRAY(Said, win->comm->size);
    int error = lower_make_window(win->comm->number, share->base);
    if (!error && share->size) error = lower_attach_memory(win->comm->number, share->base, share->size);
    int agreed = agree(win->comm, error);
    if (!agreed) agreed = gather_all(win->comm, &mine, sizeof mine, all);
    for (int rank = 0; rank < win->comm->size && !agreed; rank++) {
        win->units[rank] = (MPI_Aint)all[rank].unit;
        win->sizes[rank] = (MPI_Aint)all[rank].size;
    }
    free(all);
    return agreed;
}

/* Hints that have a default are told. All are kept: accesses are in order, whatever a program can do without. */
static Info *hints(const Win *win, const Info *given) {
    static const char *const defaults[][2] = {
        {"no_locks", "false"}, {"accumulate_ordering", "rar,raw,war,waw"}, {"accumulate_ops", "same_op_no_op"},
        {"mpi_accumulate_granularity", "0"}, {"same_size", "false"}, {"same_disp_unit", "false"}};
    Info *info = copy_info(NULL);
    for (size_t i = 0; i < sizeof defaults / sizeof *defaults; i++) put_info(info, defaults[i][0], defaults[i][1]);
    if (win->flavor == MPI_WIN_FLAVOR_SHARED) put_info(info, "alloc_shared_noncontig", "false");
    update_info(&info, given);
    return info;
}

/* Gives what this rank shares; a window that cannot be is freed. */
static int begin_window(Win *win, Share share, const Info *info) {
    win->base = share.base;
    win->owns_memory = share.is_owned;
    win->size = share.size;
    win->own_unit = (int)share.unit;
    win->info = hints(win, info);
    int error = publish(win, &share);
    if (!error) return MPI_SUCCESS;
    free_shared_memory(win->comm, win->shared);
    free_handle(win);
    return error;
}

static int make_window(Comm *comm, int flavor, Share share, const Info *info, Win **made) {
    Comm *own;
    TRY(duplicate_for_library(comm, &own));
    Win *win = new_window(own, flavor);
    TRY(begin_window(win, share, info));
    *made = win;
    return MPI_SUCCESS;
}

static int check_share(const Comm *comm, MPI_Aint unit) {
    if (comm->remote) return fail(MPI_ERR_COMM, "windows are made on communicators of one group");
    if (unit < 1) return fail(MPI_ERR_DISP, "disp_unit is %lld, expected 1 or more", (long long)unit);
    return MPI_SUCCESS;
}

int do_Win_create(void *base, MPI_Aint size, MPI_Count disp_unit, Info *info, Comm *comm, Win **win) {
    TRY(check_share(comm, (MPI_Aint)disp_unit));
    return make_window(comm, MPI_WIN_FLAVOR_CREATE, (Share){base, size, (MPI_Aint)disp_unit, false}, info, win);
}

/* Zeroed memory that begins at a multiple of what any vector of a processor asks for. */
static int allocate(MPI_Aint size, void **memory) {
    enum { ALIGNMENT = 64 };
    size_t num_bytes = ((size_t)size + ALIGNMENT) / ALIGNMENT * ALIGNMENT;
    *memory = aligned_alloc(ALIGNMENT, num_bytes);
    if (!*memory) return fail(MPI_ERR_NO_MEM, "there is no memory for a window of %lld bytes", (long long)size);
    memset(*memory, 0, num_bytes);
    return MPI_SUCCESS;
}

static int allocate_window(int flavor, Share share, const Info *info, Comm *comm, void *baseptr, Win **win) {
    /* All members must come along, or those with memory would wait for those without. */
    TRY(agree(comm, allocate(share.size, &share.base)));
    share.is_owned = true;
    TRY(make_window(comm, flavor, share, info, win));
    *(void **)baseptr = share.base;
    return MPI_SUCCESS;
}

int do_Win_allocate(MPI_Aint size, MPI_Count disp_unit, Info *info, Comm *comm, void *baseptr, Win **win) {
    TRY(check_share(comm, (MPI_Aint)disp_unit));
    Share share = {.size = size, .unit = (MPI_Aint)disp_unit};
    return allocate_window(MPI_WIN_FLAVOR_ALLOCATE, share, info, comm, baseptr, win);
}

/* ---- Memory that all have ---- */

static int expect_one_host(Comm *comm) {
    uint64_t *hosts = NEW_ARRAY(uint64_t, comm->size);
    int error = gather_hosts(comm, hosts);
    for (int rank = 1; rank < comm->size && !error; rank++)
        if (hosts[rank] != hosts[0])
            error = fail(MPI_ERR_RMA_SHARED, "rank %d runs on another host than rank 0: share memory in a communicator "
                         "of MPI_Comm_split_type with MPI_COMM_TYPE_SHARED", rank);
    free(hosts);
    return error;
}

/* The parts of all, under the number that the window will have. */
static int share_memory(Comm *comm, MPI_Aint size, const Info *info, SharedMemory **made) {
    TRY(expect_one_host(comm));
    const char *wanted = info_value(info, "alloc_shared_noncontig");
    int64_t mine = size, *sizes = NEW_ARRAY(int64_t, comm->size);
    int error = gather_all(comm, &mine, sizeof mine, sizes);
    if (!error) error = make_shared_memory(comm, sizes, wanted && !strcmp(wanted, "true"), made);
    free(sizes);
    return error;
}

int do_Win_allocate_shared(MPI_Aint size, MPI_Count disp_unit, Info *info, Comm *comm, void *baseptr, Win **win) {
    TRY(check_share(comm, (MPI_Aint)disp_unit));
    SharedMemory *shared;
    Comm *own;
    TRY(duplicate_for_library(comm, &own));
    int error = share_memory(own, size, info, &shared);
    if (error) {
        free_handle(own);
        return error;
    }
    Share share = {part_of(shared, own->rank), size, (MPI_Aint)disp_unit, false};
    Win *made = new_window(own, MPI_WIN_FLAVOR_SHARED);
    made->shared = shared;
    error = begin_window(made, share, info);
    if (error) return error;
    *(void **)baseptr = made->base;
    *win = made;
    return MPI_SUCCESS;
}

int do_Win_create_dynamic(Info *info, Comm *comm, Win **win) {
    TRY(check_share(comm, 1));
    return make_window(comm, MPI_WIN_FLAVOR_DYNAMIC, (Share){.unit = 1}, info, win);
}

/* ---- Memory of dynamic windows ---- */

static int check_dynamic(const Win *win) {
    if (win->flavor == MPI_WIN_FLAVOR_DYNAMIC) return MPI_SUCCESS;
    return fail(MPI_ERR_RMA_FLAVOR, "the window was not made by MPI_Win_create_dynamic");
}

int do_Win_attach(Win *win, void *base, MPI_Aint size) {
    TRY(check_dynamic(win));
    if (size < 0) return fail(MPI_ERR_SIZE, "size is %lld, expected 0 or more", (long long)size);
    if (size == 0) return MPI_SUCCESS;
    bool is_free = true;
    LOCKED {
        for (const Attached *one = win->attached; one; one = one->next)
            is_free &= (char *)base + size <= one->at || one->at + one->num_bytes <= (char *)base;
        if (is_free) {
            Attached *more = NEW(Attached);
            *more = (Attached){win->attached, base, size};
            win->attached = more;
        }
    }
    if (!is_free)
        return fail(MPI_ERR_RMA_ATTACH, "of %lld bytes at %p some are attached already", (long long)size, base);
    return lower_attach_memory(win->comm->number, base, size);
}

int do_Win_detach(Win *win, const void *base) {
    TRY(check_dynamic(win));
    Attached *found = NULL;
    LOCKED {
        Attached **place = &win->attached;
        while (*place && (*place)->at != base) place = &(*place)->next;
        found = *place;
        if (found) *place = found->next;
    }
    if (!found) return fail(MPI_ERR_RMA_ATTACH, "nothing at %p is attached", base);
    free(found);
    return lower_detach_memory(win->comm->number, base);
}

/* ---- The end ---- */

int do_Win_free(MPI_Win *handle) {
    Win *win = win_of(*handle);
    if (!win) return fail(MPI_ERR_WIN, *handle == MPI_WIN_NULL ? "win is MPI_WIN_NULL" : "win is no such handle");
    TRY(expect_no_epoch(win, "freeing the window"));
    TRY(delete_attributes(&win->object, &win->attributes));
    int error = flush_accesses(win, MPI_ANY_SOURCE);
    TRY(barrier(win->comm));
    TRY(lower_free_window(win->comm->number));
    int freed = free_shared_memory(win->comm, win->shared);
    free_handle(win);
    *handle = MPI_WIN_NULL;
    return error ? error : freed;
}
