/* A Port, and what its files give each other. */
#ifndef REMESH_PORT_H
#define REMESH_PORT_H

#include "_fast.h"

typedef struct {
    PyObject_HEAD
    char *base, *slot;
} Port;

/* _port.c */
/* Room for an entry of so many bytes in the ring, or NULL; `entry_done` publishes it. */
char *entry_begin(Port *self, size_t num_bytes, uint32_t *end);
void entry_done(Port *self, uint32_t end, int wake);

/* _port_windows.c: methods. */
PyObject *port_post_access(PyObject *self, PyObject *args);
PyObject *port_post_unlock(PyObject *self, PyObject *const *args, Py_ssize_t nargs);
PyObject *port_access(PyObject *self, PyObject *const *args, Py_ssize_t nargs);

#endif
