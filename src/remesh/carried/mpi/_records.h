/* The records of a lower half as C structs: what lower/records.py describes field by field. */
#ifndef REMESH_RECORDS_H
#define REMESH_RECORDS_H

#include "_fast.h"

typedef struct {
    PyObject_HEAD
    uint64_t number;
    PyObject *kind;
    uint64_t comm;
    int peer, tag;
    uint64_t address;
    int64_t num_bytes;
    char done, detached;
    int source, message_tag;
    int64_t message_bytes;
    int error;
    char cancelled, written;
    PyObject *payload;
} Request;

typedef struct {
    PyObject_HEAD
    uint64_t request, comm;
    int source, tag;
} Posted;

typedef struct {
    PyObject_HEAD
    uint64_t comm;
    int source, tag;
    int64_t num_bytes;
    PyObject *payload;
    uint64_t sender_request;
    int pid;
    uint64_t address;
    char waits;
    int ahead, ahead_piece;
} Arrived;

/* New records with the defaults of their fields; the caller fills them in. NULL with an exception. */
Request *new_request(void);
Posted *new_posted(void);
Arrived *new_arrived(void);

/* Replace a reference that a record holds. */
static inline void set_object(PyObject **place, PyObject *value) {
    PyObject *old = *place;
    Py_XINCREF(value);
    *place = value;
    Py_XDECREF(old);
}

/* Adds Request, Posted and Arrived to the module; -1 with an exception. */
int add_records(PyObject *module);

#endif
