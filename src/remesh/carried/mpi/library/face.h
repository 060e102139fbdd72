/* What differs between the faces besides the values of constants: the types of handles and of statuses. A face is what
 * a program was compiled against: MPICH's mpi.h, Open MPI's, or that of the standard ABI. One of FACE_MPICH,
 * FACE_OPENMPI and FACE_ABI is defined.
 */
#ifndef REMESH_FACE_H
#define REMESH_FACE_H

#include <stddef.h>
#include <stdint.h>

typedef int MPI_Fint;
#if defined(FACE_MPICH)
typedef int MPI_Comm;
typedef int MPI_Datatype;
typedef int MPI_Errhandler;
typedef struct Remesh_file *MPI_File;
typedef int MPI_Group;
typedef int MPI_Info;
typedef int MPI_Message;
typedef int MPI_Op;
typedef int MPI_Request;
typedef int MPI_Session;
typedef int MPI_Win;
typedef long MPI_Aint;
typedef long long MPI_Count;
/* In this face they are data that the library exports: topology.c. */
extern int *const MPI_UNWEIGHTED;
extern int *const MPI_WEIGHTS_EMPTY;
typedef long long MPI_Offset;
typedef struct {
    int count_lo, count_hi_and_cancelled, MPI_SOURCE, MPI_TAG, MPI_ERROR;
} MPI_Status;
#else
typedef struct Remesh_comm *MPI_Comm;
typedef struct Remesh_datatype *MPI_Datatype;
typedef struct Remesh_errhandler *MPI_Errhandler;
typedef struct Remesh_file *MPI_File;
typedef struct Remesh_group *MPI_Group;
typedef struct Remesh_info *MPI_Info;
typedef struct Remesh_message *MPI_Message;
typedef struct Remesh_op *MPI_Op;
typedef struct Remesh_request *MPI_Request;
typedef struct Remesh_session *MPI_Session;
typedef struct Remesh_win *MPI_Win;
#if defined(FACE_OPENMPI)
typedef ptrdiff_t MPI_Aint;
typedef long long MPI_Count;
typedef long long MPI_Offset;
typedef struct {
    int MPI_SOURCE, MPI_TAG, MPI_ERROR, _cancelled;
    size_t _ucount;
} MPI_Status;
#else
typedef intptr_t MPI_Aint;
typedef int64_t MPI_Count;
typedef int64_t MPI_Offset;
typedef struct {
    int MPI_SOURCE, MPI_TAG, MPI_ERROR, MPI_internal[5];
} MPI_Status;
#endif
#endif
typedef struct {
    MPI_Fint words[sizeof(MPI_Status) / sizeof(MPI_Fint)];
} MPI_F08_status;

typedef void MPI_Handler_function(MPI_Comm *, int *, ...);
typedef void MPI_Comm_errhandler_function(MPI_Comm *, int *, ...);
typedef void MPI_File_errhandler_function(MPI_File *, int *, ...);
typedef void MPI_Win_errhandler_function(MPI_Win *, int *, ...);
typedef void MPI_Session_errhandler_function(MPI_Session *, int *, ...);
typedef int MPI_Copy_function(MPI_Comm, int, void *, void *, void *, int *);
typedef int MPI_Delete_function(MPI_Comm, int, void *, void *);
typedef int MPI_Comm_copy_attr_function(MPI_Comm, int, void *, void *, void *, int *);
typedef int MPI_Comm_delete_attr_function(MPI_Comm, int, void *, void *);
typedef int MPI_Type_copy_attr_function(MPI_Datatype, int, void *, void *, void *, int *);
typedef int MPI_Type_delete_attr_function(MPI_Datatype, int, void *, void *);
typedef int MPI_Win_copy_attr_function(MPI_Win, int, void *, void *, void *, int *);
typedef int MPI_Win_delete_attr_function(MPI_Win, int, void *, void *);
typedef void MPI_User_function(void *, void *, int *, MPI_Datatype *);
typedef void MPI_User_function_c(void *, void *, MPI_Count *, MPI_Datatype *);
typedef int MPI_Grequest_query_function(void *, MPI_Status *);
typedef int MPI_Grequest_free_function(void *);
typedef int MPI_Grequest_cancel_function(void *, int);
typedef int MPI_Datarep_extent_function(MPI_Datatype, MPI_Aint *, void *);
typedef int MPI_Datarep_conversion_function(void *, MPI_Datatype, int, void *, MPI_Offset, void *);
typedef int MPI_Datarep_conversion_function_c(void *, MPI_Datatype, MPI_Count, void *, MPI_Offset, void *);

/* Of the tools' interface nothing is carried but its start, its end, and that there is nothing to see. */
typedef void *MPI_T_enum;
typedef void *MPI_T_cvar_handle;
typedef void *MPI_T_pvar_handle;
typedef void *MPI_T_pvar_session;
typedef void *MPI_T_event_registration;
typedef void *MPI_T_event_instance;
typedef int MPI_T_cb_safety;
typedef int MPI_T_source_order;
typedef void MPI_T_event_cb_function(MPI_T_event_instance, MPI_T_event_registration, MPI_T_cb_safety, void *);
typedef void MPI_T_event_free_cb_function(MPI_T_event_registration, MPI_T_cb_safety, void *);
typedef void MPI_T_event_dropped_cb_function(MPI_Count, MPI_T_event_registration, int, MPI_T_cb_safety, void *);

#endif
