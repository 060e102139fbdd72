/* Objects by number: what the engine looks up at every call. A dict of Python's would make an int object of each number
 * first. Python uses it as a mapping (lower/numbered.py).
 */
#ifndef REMESH_TABLE_H
#define REMESH_TABLE_H

#include "_fast.h"

typedef struct {
    uint64_t number;
    PyObject *value; /* NULL: nothing stands here */
} TableEntry;

/* Open addressing: a number stands at the first free place from its own on, so there is no gap before it. */
typedef struct {
    PyObject_HEAD
    TableEntry *entries;
    size_t room, count; /* room: 0 or a power of two, more than 4/3 of the count */
} Table;

/* Borrowed; NULL, without an exception, if nothing is there. */
PyObject *table_find(const Table *table, uint64_t number);
/* The value gets a reference of the table's. -1 with an exception. */
int table_set(Table *table, uint64_t number, PyObject *value);
/* Whether it was there. */
int table_remove(Table *table, uint64_t number);
/* One after the other, in any order: borrowed; NULL after the last. `at` begins as 0. No change in between. */
PyObject *table_next(const Table *table, size_t *at);

int is_table(PyObject *object);
/* Adds Table to the module; -1 with an exception. */
int add_table(PyObject *module);

#endif
