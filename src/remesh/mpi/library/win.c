/* What a program may ask of a window. */
#include "win.h"

bool predefined_of_window(Win *win, int keyval, void **value) {
    if (keyval == MPI_WIN_BASE) *value = win->base;
    else if (keyval == MPI_WIN_SIZE) *value = &win->size;
    else if (keyval == MPI_WIN_DISP_UNIT) *value = &win->own_unit;
    else if (keyval == MPI_WIN_CREATE_FLAVOR) *value = &win->flavor;
    else if (keyval == MPI_WIN_MODEL) *value = &win->model;
    else return false;
    return true;
}
