! Ranks of one host share memory by mpi_f08: each adds to a row of a table that all of them read.
! Prints "answer" and a sum: `shared [ROUNDS [PAUSE_US]]`.
program shared
   use mpi_f08
   use iso_c_binding
   implicit none
   interface
      integer(c_int) function usleep(us) bind(c)
         import c_int
         integer(c_int), value :: us
      end function
   end interface
   integer, parameter :: columns = 4000
   integer :: rank, size, rounds, turn, unit, of, i, pause, slept
   integer(kind=MPI_ADDRESS_KIND) :: num_bytes
   integer(kind=8) :: expected, total
   integer(kind=8), pointer :: whole(:, :)
   type(MPI_Comm) :: comm
   type(MPI_Win) :: win
   type(c_ptr) :: mine, first
   character(len=16) :: argument

   rounds = 3
   call get_command_argument(1, argument)
   if (len_trim(argument) > 0) read (argument, *) rounds
   pause = 0
   call get_command_argument(2, argument)
   if (len_trim(argument) > 0) read (argument, *) pause
   call MPI_Init()
   call MPI_Comm_split_type(MPI_COMM_WORLD, MPI_COMM_TYPE_SHARED, 0, MPI_INFO_NULL, comm)
   call MPI_Comm_rank(comm, rank)
   call MPI_Comm_size(comm, size)
   num_bytes = 8_MPI_ADDRESS_KIND*columns
   call MPI_Win_allocate_shared(num_bytes, 8, MPI_INFO_NULL, comm, mine, win)
   call MPI_Win_shared_query(win, 0, num_bytes, unit, first)
   if (num_bytes /= 8*columns .or. unit /= 8) call wrong(0_8, num_bytes)
   call c_f_pointer(first, whole, [columns, size])
   total = 0
   do turn = 1, rounds
      if (rank == 0 .and. turn == rounds) call wait_at_gate()
      do i = 1, columns
         whole(i, rank + 1) = whole(i, rank + 1) + i*(turn + rank)
      end do
      call MPI_Win_fence(0, win)
      do of = 0, size - 1
         expected = int(columns, 8)*(columns + 1)/2*(turn*(turn + 1)/2 + turn*of)
         if (sum(whole(:, of + 1)) /= expected) call wrong(sum(whole(:, of + 1)), expected)
         total = total + expected
      end do
      call MPI_Win_fence(0, win)
      slept = usleep(int(pause, c_int))
   end do
   if (rank == 0) print '(a, i0)', 'answer ', total
   call MPI_Win_free(win)
   call MPI_Finalize()

contains
   include 'gate.inc'

   subroutine wrong(found, expected)
      integer(kind=8), intent(in) :: found, expected
      print *, 'rank', rank, 'round', turn, 'found', found, 'expected', expected
      call MPI_Abort(MPI_COMM_WORLD, 1)
   end subroutine
end program
