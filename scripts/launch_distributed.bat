@echo off
rem Runs a Python script as N processes on this host: launch_distributed.bat N train.py [arguments ...]
rem PYTHON chooses the interpreter (default: python).
setlocal enabledelayedexpansion
if "%~2"=="" (
    echo usage: %~nx0 N script.py [arguments ...], for example: %~nx0 4 train.py --epochs 10 1>&2
    exit /b 2
)
if "%PYTHON%"=="" set PYTHON=python
set NPROC_PER_NODE=%~1
set REST=
:next
shift
if "%~1"=="" goto run
set REST=!REST! %1
goto next
:run
"%PYTHON%" -m cyxjax.launch --nproc-per-node %NPROC_PER_NODE% %REST%
exit /b %ERRORLEVEL%
