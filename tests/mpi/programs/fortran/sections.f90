! Array sections of mpi_f08, and what else the module leads to: each step checks itself. Prints "answer" and a sum.
! `sections [ROUNDS [PAUSE_US]]`; `sections refused` gives one to a call that goes on after its return.
module called
   use mpi_f08
   use iso_c_binding
   implicit none
   integer :: noted = 0

contains
   subroutine larger_of_each(invec, inoutvec, length, datatype)
      type(c_ptr), value :: invec, inoutvec
      integer :: length
      type(MPI_Datatype) :: datatype
      integer, pointer :: given(:), kept(:)
      call c_f_pointer(invec, given, [length])
      call c_f_pointer(inoutvec, kept, [length])
      if (datatype == MPI_INTEGER) kept = max(given, kept)
   end subroutine

   subroutine note(comm, error_code)
      type(MPI_Comm) :: comm
      integer :: error_code
      if (comm /= MPI_COMM_NULL .and. error_code /= MPI_SUCCESS) noted = noted + 1
   end subroutine
end module

program sections
   use mpi_f08
   use called
   use iso_c_binding
   implicit none
   interface
      integer(c_int) function usleep(us) bind(c)
         import c_int
         integer(c_int), value :: us
      end function
   end interface
   type :: point
      sequence
      real(8) :: x, y
      integer :: unit, more
   end type
   integer :: rank, size, left, right, rounds, pause, turn, slept
   integer(8) :: total, all_of_it
   character(len=16) :: argument

   rounds = 1
   pause = 0
   call get_command_argument(1, argument)
   call MPI_Init()
   call MPI_Comm_rank(MPI_COMM_WORLD, rank)
   call MPI_Comm_size(MPI_COMM_WORLD, size)
   right = modulo(rank + 1, size)
   left = modulo(rank - 1, size)
   if (argument == 'refused') call refused()
   if (len_trim(argument) > 0) read (argument, *) rounds
   call get_command_argument(2, argument)
   if (len_trim(argument) > 0) read (argument, *) pause
   total = 0
   call functions_of_the_module()
   do turn = 1, rounds
      if (rank == 0 .and. turn == rounds) call wait_at_gate()
      call blocking()
      call going_on()
      call parts_of_structures()
      call collective()
      call large_counts()
      call windows()
      call files()
      slept = usleep(int(pause, c_int))
   end do
   call MPI_Allreduce(total, all_of_it, 1, MPI_INTEGER8, MPI_SUM, MPI_COMM_WORLD)
   if (rank == 0) print '(a, i0)', 'answer ', all_of_it
   call MPI_Finalize()

contains
   include 'gate.inc'

   subroutine check(is_right, what)
      logical, intent(in) :: is_right
      character(len=*), intent(in) :: what
      if (is_right) return
      print *, 'rank', rank, 'round', turn, 'wrong: ', what
      call MPI_Abort(MPI_COMM_WORLD, 1)
   end subroutine

   integer function value_of(of, place)
      integer, intent(in) :: of, place
      value_of = 1000*of + 7*place + turn
   end function

   subroutine blocking()
      integer :: a(12), b(3, 4), wanted(3, 4), i, count
      character(len=5) :: words(4), got(2)
      type(MPI_Status) :: status
      a = [(value_of(rank, i), i=1, 12)]
      b = -1
      ! Every second one backwards, into every second column.
      call MPI_Sendrecv(a(12:1:-2), 6, MPI_INTEGER, right, 1, b(:, 1:3:2), 6, MPI_INTEGER, left, 1, &
                        MPI_COMM_WORLD, status)
      wanted = -1
      wanted(:, 1) = [(value_of(left, i), i=12, 8, -2)]
      wanted(:, 3) = [(value_of(left, i), i=6, 2, -2)]
      call check(all(b == wanted), 'Sendrecv')
      call MPI_Get_count(status, MPI_INTEGER, count)
      call check(count == 6 .and. status%MPI_SOURCE == left, 'status of Sendrecv')
      ! A message shorter than the section leaves the rest as it was.
      b = -2
      call MPI_Sendrecv(a, 2, MPI_INTEGER, right, 2, b(2, :), 4, MPI_INTEGER, left, 2, MPI_COMM_WORLD, &
                        MPI_STATUS_IGNORE)
      call check(all(b(2, :) == [value_of(left, 1), value_of(left, 2), -2, -2]) .and. all(b(1, :) == -2), 'short')
      words = ['one  ', 'two  ', 'three', 'four ']
      call MPI_Sendrecv(words(2:4:2), 10, MPI_CHARACTER, right, 3, got, 10, MPI_CHARACTER, left, 3, MPI_COMM_WORLD, &
                        MPI_STATUS_IGNORE)
      call check(all(got == ['two  ', 'four ']), 'words')
      ! None at all, one, and the place of an element.
      call MPI_Sendrecv(a(5:4), 0, MPI_INTEGER, right, 4, b(1:2, 3:2), 0, MPI_INTEGER, left, 4, MPI_COMM_WORLD, status)
      call MPI_Sendrecv(a(3), 2, MPI_INTEGER, right, 5, b(2, 2), 2, MPI_INTEGER, left, 5, MPI_COMM_WORLD, status)
      call check(b(2, 2) == value_of(left, 3) .and. b(3, 2) == value_of(left, 4), 'place of an element')
      total = total + sum(b)
   end subroutine

   subroutine going_on()
      integer :: field(6, 5, 3), other(6, 5, 3), wanted(6, 5, 3), i, j, k
      type(MPI_Request) :: requests(4)
      type(MPI_Status) :: statuses(4)
      type(MPI_Datatype) :: pair
      do k = 1, 3
         do j = 1, 5
            do i = 1, 6
               field(i, j, k) = value_of(rank, 100*i + 10*j + k)
            end do
         end do
      end do
      other = 0
      wanted = 0
      call MPI_Type_contiguous(2, MPI_INTEGER, pair)
      call MPI_Type_commit(pair)
      ! Whole sections, a part of one that ends within a row, and a datatype of two elements.
      call MPI_Irecv(other(1, :, :), 15, MPI_INTEGER, left, 6, MPI_COMM_WORLD, requests(1))
      call MPI_Irecv(other(2:6:2, 5:1:-2, 3), 4, pair, left, 7, MPI_COMM_WORLD, requests(2))
      call MPI_Isend(field(6, :, :), 15, MPI_INTEGER, right, 6, MPI_COMM_WORLD, requests(3))
      call MPI_Isend(field(3:4, 2, 1:3:2), 4, MPI_INTEGER, right, 7, MPI_COMM_WORLD, requests(4))
      call MPI_Waitall(4, requests, statuses)
      call check(all([(requests(i) == MPI_REQUEST_NULL, i=1, 4)]), 'Waitall')
      do k = 1, 3
         do j = 1, 5
            wanted(1, j, k) = value_of(left, 600 + 10*j + k)
         end do
      end do
      wanted(2:6:2, 5, 3) = [value_of(left, 321), value_of(left, 421), value_of(left, 323)]
      wanted(2, 3, 3) = value_of(left, 423)
      call check(all(other == wanted), 'Irecv')
      call MPI_Send_init(field(::5, 1, 2), 2, MPI_INTEGER, right, 8, MPI_COMM_WORLD, requests(1))
      call MPI_Recv_init(other(::5, 4, 2), 2, MPI_INTEGER, left, 8, MPI_COMM_WORLD, requests(2))
      do i = 1, 2
         field(1, 1, 2) = value_of(rank, i)
         call MPI_Startall(2, requests)
         call MPI_Waitall(2, requests, MPI_STATUSES_IGNORE)
         call check(other(1, 4, 2) == value_of(left, i) .and. other(6, 4, 2) == value_of(left, 612), 'Start')
      end do
      call MPI_Request_free(requests(1))
      call MPI_Request_free(requests(2))
      call MPI_Type_free(pair)
      total = total + sum(int(other, 8))
   end subroutine

   subroutine parts_of_structures()
      type(point) :: points(5), got(5)
      integer :: i
      points = [(point(value_of(rank, i), 0.5d0*i, i, 0), i=1, 5)]
      got = point(0d0, 0d0, 0, 0)
      call MPI_Sendrecv(points%y, 5, MPI_DOUBLE_PRECISION, right, 9, got(5:1:-1)%x, 5, MPI_DOUBLE_PRECISION, left, 9, &
                        MPI_COMM_WORLD, MPI_STATUS_IGNORE)
      call check(all(got%x == [(0.5d0*i, i=5, 1, -1)]) .and. all(got%y == 0d0), 'component')
   end subroutine

   subroutine collective()
      integer :: table(4, 6), sums(6), i
      type(MPI_Request) :: request
      table = 0
      table(2, :) = [(value_of(rank, i), i=1, 6)]
      call MPI_Allreduce(table(2, :), table(3, :), 6, MPI_INTEGER, MPI_SUM, MPI_COMM_WORLD)
      sums = [(size*(7*i + turn) + 500*size*(size - 1), i=1, 6)]
      call check(all(table(3, :) == sums) .and. all(table(4, :) == 0), 'Allreduce')
      call MPI_Allreduce(MPI_IN_PLACE, table(2, :), 6, MPI_INTEGER, MPI_SUM, MPI_COMM_WORLD)
      call check(all(table(2, :) == sums), 'Allreduce in place')
      if (rank == 0) table(1, ::2) = [11, 12, 13]
      call MPI_Bcast(table(1, ::2), 3, MPI_INTEGER, 0, MPI_COMM_WORLD)
      call check(all(table(1, :) == [11, 0, 12, 0, 13, 0]), 'Bcast')
      call gathered()
      call MPI_Iallreduce(MPI_IN_PLACE, sums, 6, MPI_INTEGER, MPI_MAX, MPI_COMM_WORLD, request)
      call MPI_Wait(request, MPI_STATUS_IGNORE)
      total = total + sum(table) + sum(sums)
   end subroutine

   subroutine gathered()
      integer :: rows(2, size), mine(3), i
      rows = -1
      mine = [rank, -rank, rank*rank]
      call MPI_Allgather(mine(3:), 1, MPI_INTEGER, rows(2, :), 1, MPI_INTEGER, MPI_COMM_WORLD)
      call check(all(rows(2, :) == [(i*i, i=0, size - 1)]) .and. all(rows(1, :) == -1), 'Allgather')
   end subroutine

   subroutine large_counts()
      integer :: a(8), b(8), i
      integer(MPI_COUNT_KIND) :: count, bytes
      type(MPI_Datatype) :: every_second
      type(MPI_Request) :: request
      a = [(value_of(rank, i), i=1, 8)]
      b = 0
      count = 4
      call MPI_Irecv(b(8:1:-2), count, MPI_INTEGER, left, 10, MPI_COMM_WORLD, request)
      call MPI_Send(a(::2), count, MPI_INTEGER, right, 10, MPI_COMM_WORLD)
      call MPI_Wait(request, MPI_STATUS_IGNORE)
      call check(all(b(2::2) == [(value_of(left, i), i=7, 1, -2)]), 'large counts')
      call MPI_Type_vector(count, 1_MPI_COUNT_KIND, 2_MPI_COUNT_KIND, MPI_INTEGER, every_second)
      call MPI_Type_size(every_second, bytes)
      call check(bytes == 16, 'Type_size')
      call MPI_Type_free(every_second)
   end subroutine

   subroutine windows()
      integer :: memory(10), a(6), got(6), i
      type(MPI_Win) :: win
      memory = 0
      a = [(value_of(rank, i), i=1, 6)]
      got = 0
      call MPI_Win_create(memory, int(40, MPI_ADDRESS_KIND), 4, MPI_INFO_NULL, MPI_COMM_WORLD, win)
      call MPI_Win_fence(0, win)
      call MPI_Put(a(6:2:-2), 3, MPI_INTEGER, right, 1_MPI_ADDRESS_KIND, 3, MPI_INTEGER, win)
      call MPI_Win_fence(0, win)
      call check(all(memory(1:5) == [0, value_of(left, 6), value_of(left, 4), value_of(left, 2), 0]), 'Put')
      call MPI_Win_fence(0, win)
      call MPI_Accumulate(a(::3), 2, MPI_INTEGER, right, 1_MPI_ADDRESS_KIND, 2, MPI_INTEGER, MPI_SUM, win)
      call MPI_Win_fence(0, win)
      call MPI_Get(got(::2), 3, MPI_INTEGER, right, 1_MPI_ADDRESS_KIND, 3, MPI_INTEGER, win)
      call MPI_Win_fence(0, win)
      call check(all(got == [a(6) + a(1), 0, a(4) + a(4), 0, a(2), 0]), 'Get')
      call MPI_Win_free(win)
   end subroutine

   subroutine files()
      integer :: rows(3, 4), back(3, 4), i
      type(MPI_File) :: file
      type(MPI_Request) :: request
      rows = reshape([(value_of(rank, i), i=1, 12)], [3, 4])
      back = 0
      call MPI_File_open(MPI_COMM_WORLD, 'sections.data', MPI_MODE_CREATE + MPI_MODE_RDWR, MPI_INFO_NULL, file)
      call MPI_File_write_at_all(file, int(16*rank, MPI_OFFSET_KIND), rows(2, :), 4, MPI_INTEGER, MPI_STATUS_IGNORE)
      call MPI_File_iread_at(file, int(16*rank, MPI_OFFSET_KIND), back(3, :), 4, MPI_INTEGER, request)
      call MPI_Wait(request, MPI_STATUS_IGNORE)
      call check(all(back(3, :) == rows(2, :)) .and. all(back(1:2, :) == 0), 'file')
      call MPI_File_close(file)
      call check(file == MPI_FILE_NULL, 'File_close')
   end subroutine

   subroutine functions_of_the_module()
      type(MPI_Comm) :: copy, ring
      type(MPI_Op) :: op
      type(MPI_Errhandler) :: handler
      type(MPI_Status) :: status
      type(c_ptr) :: memory
      integer :: keyval, error, number(MPI_STATUS_SIZE), bytes, sums(2), sources(1), destinations(1), seen
      integer(MPI_ADDRESS_KIND) :: extra, attribute
      logical :: is_there
      integer, target :: room(100)
      call MPI_Comm_create_keyval(MPI_COMM_DUP_FN, MPI_COMM_NULL_DELETE_FN, keyval, 0_MPI_ADDRESS_KIND)
      call MPI_Comm_set_attr(MPI_COMM_WORLD, keyval, 42_MPI_ADDRESS_KIND)
      call MPI_Comm_dup(MPI_COMM_WORLD, copy)
      call MPI_Comm_get_attr(copy, keyval, attribute, is_there)
      call check(is_there .and. attribute == 42, 'Comm_get_attr')
      call MPI_Comm_get_attr(MPI_COMM_WORLD, MPI_TAG_UB, attribute, is_there)
      call check(is_there .and. attribute >= 32767, 'MPI_TAG_UB')
      call MPI_Comm_free_keyval(keyval)
      call check(copy /= MPI_COMM_WORLD .and. copy%MPI_VAL /= MPI_COMM_WORLD .and. copy == copy%MPI_VAL, 'handles')
      call MPI_Op_create(larger_of_each, .true., op)
      sums = [rank, -rank]
      call MPI_Allreduce(MPI_IN_PLACE, sums, 2, MPI_INTEGER, op, copy)
      call check(all(sums == [size - 1, 0]), 'Op_create')
      call MPI_Op_free(op)
      call MPI_Comm_create_errhandler(note, handler)
      call MPI_Comm_set_errhandler(copy, handler)
      call MPI_Errhandler_free(handler)
      noted = 0
      call MPI_Comm_call_errhandler(copy, MPI_ERR_RANK, error)
      call check(error == MPI_SUCCESS .and. noted == 1, 'error handler')
      status%MPI_TAG = 77
      call MPI_Status_f082f(status, number)
      call check(number(MPI_TAG) == 77, 'Status_f082f')
      call MPI_Sizeof(total, bytes)
      call check(bytes == 8, 'Sizeof')
      call MPI_Buffer_attach(room, 400)
      call MPI_Buffer_detach(memory, bytes)
      call MPI_Get_address(room(2), extra)
      call MPI_Get_address(room(1), attribute)
      call check(bytes == 400 .and. transfer(memory, attribute) == attribute, 'Buffer_detach')
      call check(MPI_Aint_diff(extra, attribute) == 4, 'Get_address')
      sources = [left]
      destinations = [right]
      call MPI_Dist_graph_create_adjacent(copy, 1, sources, MPI_UNWEIGHTED, 1, destinations, MPI_UNWEIGHTED, &
                                          MPI_INFO_NULL, .false., ring)
      call MPI_Neighbor_allgather(rank, 1, MPI_INTEGER, seen, 1, MPI_INTEGER, ring)
      call check(seen == left, 'Neighbor_allgather')
      call MPI_Comm_free(ring)
      call MPI_Comm_free(copy)
      call check(MPI_Wtime() > 0, 'Wtime')
   end subroutine

   subroutine refused()
      integer :: table(4, 6)
      type(MPI_Request) :: request
      table = 1
      call MPI_Iallreduce(MPI_IN_PLACE, table(2, :), 6, MPI_INTEGER, MPI_SUM, MPI_COMM_WORLD, request)
      call MPI_Wait(request, MPI_STATUS_IGNORE)
      print *, 'not refused'
      call MPI_Finalize()
      stop
   end subroutine
end program
