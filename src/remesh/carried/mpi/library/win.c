/* What a program may ask of a window. */
#include "win.h"

#include "group.h"
#include "info.h"

bool predefined_of_window(Win *win, int keyval, void **value) {
    if (keyval == MPI_WIN_BASE) *value = win->base;
    else if (keyval == MPI_WIN_SIZE) *value = &win->size;
    else if (keyval == MPI_WIN_DISP_UNIT) *value = &win->own_unit;
    else if (keyval == MPI_WIN_CREATE_FLAVOR) *value = &win->flavor;
    else if (keyval == MPI_WIN_MODEL) *value = &win->model;
    else return false;
    return true;
}

int do_Win_get_group(Win *win, Group **group) {
    *group = make_group(win->comm->size, win->comm->world);
    return MPI_SUCCESS;
}

int do_Win_set_name(Win *win, const char *win_name) {
    snprintf(win->name, sizeof win->name, "%s", win_name);
    return MPI_SUCCESS;
}

int do_Win_get_name(Win *win, char *win_name, int *resultlen) {
    *resultlen = sprintf(win_name, "%s", win ? win->name : "MPI_WIN_NULL");
    return MPI_SUCCESS;
}

int do_Win_set_info(Win *win, Info *info) {
    update_info(&win->info, info);
    return MPI_SUCCESS;
}

int do_Win_get_info(Win *win, Info **info_used) {
    *info_used = copy_info(win->info);
    return MPI_SUCCESS;
}

static int first_with_memory(const Win *win) {
    for (int rank = 0; rank < win->comm->size; rank++)
        if (win->sizes[rank]) return rank;
    return 0;
}

int do_Win_shared_query(Win *win, int rank, MPI_Aint *size, MPI_Count *disp_unit, void *baseptr) {
    if (win->flavor == MPI_WIN_FLAVOR_DYNAMIC)
        return fail(MPI_ERR_RMA_FLAVOR, "the window was made by MPI_Win_create_dynamic");
    int wanted = rank == MPI_PROC_NULL ? first_with_memory(win) : rank;
    TRY(check_window_rank(win, wanted));
    /* Of another rank's memory this process has what they share. */
    bool is_here = win->shared || wanted == win->comm->rank;
    *size = is_here ? win->sizes[wanted] : 0;
    *disp_unit = win->units[wanted];
    *(void **)baseptr = !is_here ? NULL : win->shared ? part_of(win->shared, wanted) : win->base;
    return MPI_SUCCESS;
}
