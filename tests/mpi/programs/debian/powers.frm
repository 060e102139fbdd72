#-
Off statistics;
Symbols a,b,c,d,e,x;
Local F = (a+b+c+d+e)^26;
.sort
id a = b+x;
.sort
id b = c-2*x;
.sort
id x = 1;
id e = 2;
.sort
Format 80;
Print +s;
.end
